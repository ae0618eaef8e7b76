// Memory for weights and activations, allocated at once.

#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

#include "vectors.h"

namespace inflight {

// Memory of zeros in huge pages where the system has them, because weights and activations are read from end to end.
class Arena {
  public:
    // The system allocates a page at the first write to it. With `reserves` that is now, so that it counts as used.
    explicit Arena(size_t num_bytes, bool reserves = true) : num_bytes_(round_up(num_bytes + 1, HUGE_PAGE)) {
        mapped_ = mmap(nullptr, num_bytes_ + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped_ == MAP_FAILED) throw std::bad_alloc();
        memory_ = reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(mapped_), HUGE_PAGE));
        madvise(memory_, num_bytes_, MADV_HUGEPAGE);
        if (reserves) std::memset(memory_, 0, num_bytes_);
    }
    ~Arena() { munmap(mapped_, num_bytes_ + HUGE_PAGE); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    char* data() const { return memory_; }
    size_t size() const { return num_bytes_; }

  private:
    static constexpr int64_t HUGE_PAGE = 2 << 20;
    size_t num_bytes_;
    void* mapped_;
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
