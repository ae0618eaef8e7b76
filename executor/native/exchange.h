// Exchange of activations between the ranks of a tensor-parallel decoder: by a function that the caller provides, or on
// one machine through memory that the ranks share.

#pragma once

#include <time.h>

#include "decoder.h"
#include "pool.h"

namespace inflight {

// Begin of the shared memory, which is zero at first. The rest has two halves, used in turn, each with a part for every
// rank: a rank may fill its part for the next exchange while others still read those of this one. It cannot be two
// ahead, because everyone has to arrive in between. shared.py has the same layout.
struct SharedParts {
    alignas(64) std::atomic<uint32_t> num_arrived;
    alignas(64) std::atomic<uint32_t> round;
    alignas(64) std::atomic<uint32_t> is_broken;  // set from outside when a rank is lost
    alignas(64) int64_t half_bytes;
    double timeout_s;

    char* half(int index) { return reinterpret_cast<char*>(this + 1) + index * half_bytes; }

    // Returns when all ranks have arrived, or false if one does not in time.
    bool meet(int64_t num_ranks) {
        const uint32_t seen = round.load(std::memory_order_acquire);
        if (num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_ranks) {
            num_arrived.store(0, std::memory_order_relaxed);
            round.fetch_add(1);
            futex(FUTEX_WAKE, INT_MAX, nullptr);
            return true;
        }
        for (int spin = 0; spin < SPINS; ++spin) {
            if (round.load(std::memory_order_acquire) != seen) return true;
            pause_briefly();
        }
        for (int yield = 0; yield < YIELDS; ++yield) {
            if (round.load(std::memory_order_acquire) != seen) return true;
            sched_yield();
        }
        const double ends_at = seconds() + timeout_s;
        while (round.load(std::memory_order_acquire) == seen) {
            if (is_broken.load() || seconds() > ends_at) return false;
            const timespec at_most{0, 10'000'000};
            futex(FUTEX_WAIT, seen, &at_most);
        }
        return true;
    }

  private:
    // Other ranks may need this core.
    static constexpr int YIELDS = 200;

    void futex(int operation, uint32_t argument, const timespec* timeout) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&round), operation, argument, timeout, nullptr, 0);
    }

    static double seconds() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    }
};
static_assert(sizeof(SharedParts) == 256);

class Exchange {
  public:
    // `num_bytes` are the most that a rank gives in this step. Throws std::bad_alloc.
    void begin(const DecoderStep& step, int64_t num_ranks, int64_t rank, int64_t num_bytes) {
        all_gather_ = step.all_gather;
        shared_ = step.shared_parts;
        num_ranks_ = num_ranks;
        rank_ = rank;
        has_failed_ = false;
        if (shared_ == nullptr) {
            buffer_.reserve(num_ranks * num_bytes);
            filled_ = read_ = buffer_.data();
        } else {
            if (num_ranks * num_bytes > shared_->half_bytes) throw std::bad_alloc();
            filled_ = shared_->half(half_);
        }
    }

    // The memory of this rank's part of `num_bytes`, to be filled before `run`.
    char* own_part(int64_t num_bytes) const { return filled_ + rank_ * num_bytes; }

    // A rank's part, after `run`.
    char* part(int64_t rank, int64_t num_bytes) const { return read_ + rank * num_bytes; }

    // Gives every rank all parts. One thread calls it, while the others wait for the end of the phase.
    void run(int64_t num_bytes) {
        if (has_failed_) return;
        if (shared_ == nullptr) {
            has_failed_ = all_gather_(filled_, num_bytes) != 0;
            return;
        }
        has_failed_ = !shared_->meet(num_ranks_);
        read_ = shared_->half(half_);
        half_ = 1 - half_;
        filled_ = shared_->half(half_);
    }

    // Whether a rank could not be reached. The rest of the step is then not computed.
    bool has_failed() const { return has_failed_; }

  private:
    AllGather all_gather_ = nullptr;
    SharedParts* shared_ = nullptr;
    int64_t num_ranks_ = 1, rank_ = 0;
    char *filled_ = nullptr, *read_ = nullptr;
    int half_ = 0;
    bool has_failed_ = false;
    ThreadBuffer buffer_;
};

}  // namespace inflight
