// Threads that compute the phases of a step together.
//
// `run` wakes every thread once per step. Inside, `Team::each` distributes the tasks of a phase one by one and returns
// when all of them are done. This matters more than locality: if another process occupies a core for a while, the other
// threads do the rest of the phase. Within a step a waiting thread spins, then yields its core, and sleeps only when a
// phase takes unreasonably long, because a wake-up takes longer than most phases. Between steps it sleeps soon.
//
// Nothing is allocated in a run. An exception on one thread could not be passed to the caller, and on the caller's it
// would leave the others waiting. The memory of the threads is reserved before, on the caller's thread, where a failure
// is one of the call.

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "vectors.h"

namespace inflight {

// About 50 microseconds on current processors.
constexpr int SPINS = 1000;
// Yields before a thread sleeps: some milliseconds, of which other processes may use any share.
constexpr int YIELDS_IN_STEP = 20000;

ALWAYS_INLINE void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Of this thread. Time in which other processes have its core does not count.
inline int64_t processor_nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

// A number that threads wait on until it changes.
struct Signal {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> num_asleep{0};

    void wait_while(uint32_t seen, int num_yields) {
        for (int spin = 0; spin < SPINS; ++spin) {
            if (value.load(std::memory_order_acquire) != seen) return;
            pause_briefly();
        }
        for (int yield = 0; yield < num_yields; ++yield) {
            if (value.load(std::memory_order_acquire) != seen) return;
            sched_yield();
        }
        num_asleep.fetch_add(1);
        while (value.load() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
        num_asleep.fetch_sub(1);
    }

    // Sequentially consistent on both sides: either the sleeper sees the new value or this thread sees the sleeper.
    void raise() {
        value.fetch_add(1);
        if (num_asleep.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    }

  private:
    void futex(int operation, uint32_t argument) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), operation, argument, nullptr, nullptr, 0);
    }
};

// State that the threads of a pool share in a phase.
struct Phase {
    alignas(64) std::atomic<int64_t> next_task{0};
    alignas(64) std::atomic<int> num_arrived{0};
    alignas(64) Signal ended;
};

// Makes this thread treat denormal numbers as zero during its lifetime, or as the numbers that they are.
template <bool FLUSH>
class Denormals {
  public:
#if defined(__x86_64__)
    Denormals() : saved_(__builtin_ia32_stmxcsr()) {
        __builtin_ia32_ldmxcsr(FLUSH ? saved_ | BITS : saved_ & ~BITS);
    }
    ~Denormals() { __builtin_ia32_ldmxcsr(saved_); }
    Denormals(const Denormals&) = delete;
    Denormals& operator=(const Denormals&) = delete;

  private:
    static constexpr unsigned BITS = 0x8040;
    const unsigned saved_;
#else
    Denormals() {}
#endif
};
using FlushDenormals = Denormals<true>;  // each would cost some hundred cycles
using KeepDenormals = Denormals<false>;

// Memory of one thread, kept between runs. Not on a stack, because threads may have small ones.
class ThreadBuffer {
  public:
    // Throws std::bad_alloc. The previous content is lost.
    void reserve(size_t num_bytes) {
        if (num_bytes <= num_bytes_) return;
        const size_t rounded = round_up(num_bytes, ALIGNMENT);
        memory_.reset(static_cast<char*>(std::aligned_alloc(ALIGNMENT, rounded)));
        num_bytes_ = memory_ == nullptr ? 0 : rounded;
        if (memory_ == nullptr) throw std::bad_alloc();
    }
    char* data() const { return memory_.get(); }

  private:
    static constexpr int64_t ALIGNMENT = 64;
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    size_t num_bytes_ = 0;
};

// One thread's view of a step.
class Team {
  public:
    Team(int thread, int num_threads, Phase& phase) : thread(thread), num_threads(num_threads), phase_(phase) {}

    const int thread, num_threads;

    // Calls `work(task)` for every task in `[0, num_tasks)` on some thread, and returns when all are done.
    template <class Work>
    void each(int64_t num_tasks, const Work& work) {
        for (int64_t task; (task = phase_.next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) work(task);
        const uint32_t seen = phase_.ended.value.load(std::memory_order_acquire);
        if (phase_.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
            // All threads have run out of tasks, so none reads these two before the signal.
            phase_.next_task.store(0, std::memory_order_relaxed);
            phase_.num_arrived.store(0, std::memory_order_relaxed);
            phase_.ended.raise();
        } else {
            phase_.ended.wait_while(seen, YIELDS_IN_STEP);
        }
    }

  private:
    Phase& phase_;
};

// The threads: the caller of `run` and `num_threads - 1` more. One `run` at a time.
class Pool {
  public:
    explicit Pool(int num_threads) : num_threads_(num_threads), buffers_(num_threads) {
        for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
    }

    ~Pool() {
        work_ = nullptr;
        started_.raise();
        for (std::thread& thread : threads_) thread.join();
    }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }

    // Gives each thread `num_bytes` of memory. Throws std::bad_alloc.
    void reserve(size_t num_bytes) {
        for (ThreadBuffer& buffer : buffers_) buffer.reserve(num_bytes);
    }
    char* buffer(int thread) const { return buffers_[thread].data(); }

    // Calls `work` on every thread at once and returns when all have finished. `work` does not throw.
    void run(const std::function<void(Team&)>& work) {
        work_ = &work;
        started_.raise();
        take_part(0);
    }

  private:
    void take_part(int thread) noexcept {
        const FlushDenormals flush_denormals;
        Team team(thread, num_threads_, phase_);
        (*work_)(team);
        team.each(0, [](int64_t) {});
    }

    void serve(int thread) {
        pthread_setname_np(pthread_self(), "inflight-math");
        for (uint32_t seen = 0;; ++seen) {
            started_.wait_while(seen, 0);
            if (work_ == nullptr) return;
            take_part(thread);
        }
    }

    const int num_threads_;
    const std::function<void(Team&)>* work_ = nullptr;
    Phase phase_;
    alignas(64) Signal started_;
    std::vector<ThreadBuffer> buffers_;
    std::vector<std::thread> threads_;
};

// For calls with a C interface: returns 0, or 1 if there is not enough memory for `work`.
template <class Work>
int64_t or_out_of_memory(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// Calls `work` on every thread of the pool, or on this thread alone if `pool` is null.
template <class Work>
void run_on(Pool* pool, const Work& work) {
    if (pool != nullptr) {
        pool->run(work);
    } else {
        const FlushDenormals flush_denormals;
        Phase phase;
        Team team(0, 1, phase);
        work(team);
    }
}

}  // namespace inflight
