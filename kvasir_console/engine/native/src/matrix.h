// A packed matrix, and what all its products need: the rows in pieces, memory that is kept.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "formats.h"
#include "pool.h"

struct Segment {  // consecutive outputs of one matrix, in one format
    int64_t format;  // a Format
    int64_t n_out;
    int64_t column;  // of its first output
    const uint8_t* data;  // panels; the last is padded
};

struct Matrix {
    int64_t n_in, n_out;
    int64_t n_segments;
    const Segment* segments;

    int64_t units() const { return (n_in + UNIT - 1) / UNIT; }
};

inline int64_t panels_of(int64_t n_out) { return (n_out + LANES - 1) / LANES; }

// Memory that grows and is kept, 64-byte aligned.
class Scratch {
public:
    float* take(int64_t floats) {
        if (floats > size_) {
            free(data_);
            data_ = nullptr, size_ = 0;
            void* fresh = nullptr;
            if (posix_memalign(&fresh, 64, size_t(floats) * 4)) throw std::bad_alloc();
            data_ = static_cast<float*>(fresh), size_ = floats;
        }
        return data_;
    }

private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

// The begin of an index's contiguous share of ``total`` things; its end is the begin of the next index.
inline int64_t share(int64_t total, int64_t index, int64_t count) { return total * index / count; }

constexpr int ROW_BLOCK = 128;  // rows at a time: a piece of them fits the second cache
