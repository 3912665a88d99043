// The functions that Python calls. Every pointer and size was checked there.

#include "layers.h"
#include "pack.h"

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace {

// Computes with the pool held; false if memory ran out.
template <class F>
int32_t computing(F&& work) {
    Pool& pool = Pool::get();
    std::lock_guard<std::mutex> turn(pool.turn());
    try {
        work(pool);
        return 1;
    } catch (const std::exception&) {
        return 0;
    }
}

}  // namespace

#pragma GCC visibility push(default)  // all else is hidden: see build.py
extern "C" {

int32_t kv_version() { return 2; }

const char* kv_isa() { return ISA; }

int32_t kv_set_threads(int32_t count) {
    return computing([&](Pool& pool) { pool.set_count(count); });
}

int32_t kv_threads() { return Pool::get().count(); }

// Bytes of one panel; 0 for an unknown format.
int64_t kv_panel_bytes(int64_t format, int64_t n_in) {
    int64_t bytes = 0;
    with_format(int32_t(format), [&](auto packing) { bytes = decltype(packing)::panel_bytes((n_in + UNIT - 1) / UNIT); });
    return bytes;
}

int64_t kv_row_bytes(int64_t format, int64_t n_in) {
    const BlockShape shape = block_shape(int32_t(format));
    return shape.values ? n_in / shape.values * shape.bytes : 0;
}

int32_t kv_pack(int64_t format, const uint8_t* rows, int64_t n_rows, int64_t n_in, uint8_t* panels) {
    return computing([&](Pool& pool) {
        const int64_t row_bytes = kv_row_bytes(format, n_in), panel_bytes = kv_panel_bytes(format, n_in);
        pool.run(panels_of(n_rows), [&](int, int64_t panel) {
            with_format(int32_t(format), [&](auto packing) {
                const int64_t row = panel * LANES;
                pack_panel<decltype(packing)>(int32_t(format), rows + row * row_bytes,
                                              std::min<int64_t>(LANES, n_rows - row), row_bytes, n_in,
                                              panels + panel * panel_bytes);
            });
        });
    });
}

int32_t kv_linear(const Matrix* matrix, const float* x, int64_t rows, int64_t x_stride, float* out,
                  int64_t out_stride) {
    return computing([&](Pool& pool) { linear(*matrix, x, rows, x_stride, out, out_stride, pool); });
}

// The weights of ``count`` outputs: (count, n_in).
int32_t kv_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, float* out) {
    return computing([&](Pool& pool) {
        pool.run(count, [&](int, int64_t i) {
            const Segment* segment = matrix->segments;
            while (outputs[i] >= segment->column + segment->n_out) ++segment;
            const int64_t row = outputs[i] - segment->column;
            with_format(int32_t(segment->format), [&](auto packing) {
                using P = decltype(packing);
                unpack_row<P>(segment->data + row / LANES * P::panel_bytes(matrix->units()), int(row % LANES),
                              matrix->n_in, out + i * matrix->n_in);
            });
        });
    });
}

// Asks for large pages where they lie wholly inside ``data``, which is to be filled: fewer misses of address
// translation when all of it is read. The system may decline.
int32_t kv_large_pages(uint8_t* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t page = uintptr_t(2) << 20;
    const uintptr_t begin = (uintptr_t(data) + page - 1) / page * page, end = (uintptr_t(data) + bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    return 1;
}

// Rows of blocks as a file stores them, ``ids`` of them by number, to floats: (count, n_in).
int32_t kv_block_rows(int64_t format, const uint8_t* blocks, int64_t n_in, const int64_t* ids, int64_t count,
                      float* out) {
    return computing([&](Pool& pool) {
        const int64_t row_bytes = kv_row_bytes(format, n_in), panel_bytes = kv_panel_bytes(format, n_in);
        pool.run(count, [&](int, int64_t i) {
            static thread_local Scratch scratch;
            uint8_t* panel = reinterpret_cast<uint8_t*>(scratch.take((panel_bytes + 3) / 4));
            with_format(int32_t(format), [&](auto packing) {
                using P = decltype(packing);
                pack_panel<P>(int32_t(format), blocks + ids[i] * row_bytes, 1, row_bytes, n_in, panel);
                unpack_row<P>(panel, 0, n_in, out + i * n_in);
            });
        });
    });
}

// ---- The operations between products --------------------------------------------------------------------------------

int32_t kv_rms_norm(const float* x, int64_t rows, int64_t stride, const float* weight, int64_t width, double eps,
                    float* out, int64_t out_stride) {
    return computing([&](Pool& pool) { norm_rows(x, stride, rows, weight, width, float(eps), out, out_stride, pool); });
}

int32_t kv_gated(int64_t activation, const float* gate_up, int64_t rows, int64_t stride, int64_t width, float* out) {
    return computing([&](Pool& pool) { gated_rows(activation, gate_up, stride, rows, width, out, width, pool); });
}

int32_t kv_rotate(float* heads, int64_t rows, int64_t stride, int64_t n_heads, int64_t head_dim, const float* turns,
                  int64_t dim, int64_t halves) {
    return computing([&](Pool& pool) {
        over_rows(pool, rows, n_heads * head_dim, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                rotate(heads + r * stride, n_heads, head_dim, turns + r * dim, dim, halves);
        });
    });
}

int32_t kv_write(const Batch* batch, int64_t layer, const float* keys, const float* values, int64_t stride) {
    return computing([&](Pool& pool) { write_kv(*batch, layer, keys, values, stride, pool); });
}

int32_t kv_attend(const Batch* batch, int64_t layer, int64_t n_head, int64_t window, double scale, const float* q,
                  int64_t q_stride, float* out) {
    return computing([&](Pool& pool) {
        const AttentionShape shape{n_head, window, float(scale)};
        attend(*batch, layer, shape, q, q_stride, out, n_head * batch->kv.head_dim, pool);
    });
}

// ---- Experts --------------------------------------------------------------------------------------------------------

int32_t kv_route(const float* logits, int64_t rows, int64_t n, int64_t used, int64_t normalised, double scale,
                 int64_t* ids, float* weights) {
    return computing([&](Pool&) {
        for (int64_t r = 0; r < rows; ++r)
            route_row(logits + r * n, n, used, normalised, float(scale), ids + r * used, weights + r * used);
    });
}

int32_t kv_expert_outputs(const Network* experts, const float* x, int64_t stride, const int64_t* row_idx,
                          const int64_t* ids, int64_t pairs, float* out) {
    return computing([&](Pool& pool) { expert_outputs(experts, x, stride, row_idx, ids, pairs, out, pool); });
}

int32_t kv_weighted_sum(const float* terms, const int64_t* row_idx, const float* weights, int64_t pairs, int64_t width,
                        int64_t rows, float* out) {
    return computing([&](Pool& pool) {
        weighted_sum(terms, row_idx, weights, pairs, width, rows, out, width, pool);
    });
}

// ---- Whole layers ---------------------------------------------------------------------------------------------------

// Passes the batch's rows x (rows, D) through layers, in place.
int32_t kv_layers(const Layer* layers, int64_t count, const Batch* batch, const float* const* turns, float* x,
                  int64_t stride) {
    return computing([&](Pool& pool) {
        for (int64_t i = 0; i < count; ++i) {
            attention_half(layers[i], *batch, turns, x, stride, pool);
            feed_forward_half(layers[i], batch->rows, x, stride, pool);
        }
    });
}

// Through the first half of a layer, in place; ``normed`` (rows, D) is what its second half begins with.
int32_t kv_attention_half(const Layer* layer, const Batch* batch, const float* const* turns, float* x, int64_t stride,
                          float* normed) {
    return computing([&](Pool& pool) {
        attention_half(*layer, *batch, turns, x, stride, pool);
        const int64_t D = layer->qkv->n_in;
        norm_rows(x, stride, batch->rows, layer->ffn_norm, D, float(layer->eps), normed, D, pool);
    });
}

}  // extern "C"
#pragma GCC visibility pop
