// First calls of a process: requests the system's permission for this build's instructions, and starts threads.

#include "pool.h"

extern "C" {

// Returns 0 if the system refuses. Must be the first call.
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

// Reads memory on all threads at full speed, and returns a sum of it, so that the compiler keeps the reads.
int64_t inflight_read_memory(void* pool, const void* memory, int64_t num_bytes) {
    constexpr int64_t AT_ONCE = 1 << 20;
    typedef int64_t Numbers __attribute__((vector_size(4 * inflight::WIDTH)));
    std::atomic<int64_t> total{0};
    static_cast<inflight::Pool*>(pool)->run([&](inflight::Team& team) {
        team.each(num_bytes / AT_ONCE, [&](int64_t task) {
            const auto* numbers = reinterpret_cast<const Numbers*>(static_cast<const char*>(memory) + task * AT_ONCE);
            Numbers sums[8] = {};
            for (size_t i = 0; i < AT_ONCE / sizeof(Numbers); i += 8)
                for (int k = 0; k < 8; ++k) sums[k] += numbers[i + k];
            int64_t sum = 0;
            for (const Numbers& some : sums) sum += some[0];
            total += sum;
        });
    });
    return total;
}

}  // extern "C"
