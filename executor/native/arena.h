// Memory for weights and activations, allocated at once.

#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "vectors.h"

namespace inflight {

// Memory in huge pages where the system has them, because weights and activations are read from end to end.
class Arena {
  public:
    explicit Arena(size_t num_bytes) : num_bytes_(round_up(num_bytes + 1, HUGE_PAGE)) {
        memory_ = static_cast<char*>(std::aligned_alloc(HUGE_PAGE, num_bytes_));
        if (memory_ == nullptr) throw std::bad_alloc();
        madvise(memory_, num_bytes_, MADV_HUGEPAGE);
        std::memset(memory_, 0, num_bytes_);
    }
    ~Arena() { std::free(memory_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    char* data() const { return memory_; }
    size_t size() const { return num_bytes_; }

  private:
    static constexpr int64_t HUGE_PAGE = 2 << 20;
    size_t num_bytes_;
    char* memory_;
};

// Assigns parts of an arena; without an arena it only counts.
class Cursor {
  public:
    explicit Cursor(char* memory) : memory_(memory) {}

    template <class Number>
    Number* take(int64_t count) {
        char* taken = memory_ == nullptr ? nullptr : memory_ + used_;
        used_ += round_up(count * (int64_t)sizeof(Number), 64);
        return reinterpret_cast<Number*>(taken);
    }
    int64_t used() const { return used_; }

  private:
    char* memory_;
    int64_t used_ = 0;
};

}  // namespace inflight
