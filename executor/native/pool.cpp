// What a process does first: asks the system for what this build needs of it, and starts threads.

#include "pool.h"

extern "C" {

// 0 where the system refuses. Must be the first call.
int64_t inflight_prepare() {
#ifdef INFLIGHT_AMX
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 1;
#endif
}

void* inflight_pool_new(int64_t num_threads) { return new inflight::Pool((int)num_threads); }
void inflight_pool_free(void* pool) { delete static_cast<inflight::Pool*>(pool); }

}  // extern "C"
