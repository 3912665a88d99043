// Causal attention over the blocks of KV caches.
//
// A block holds 256 positions of every layer, (n_layer, 2, J, 256 * h): of a key-value head first all its keys, then
// all its values. Values lie position by position, (256, h). Keys lie in panels of 16 positions, (16, h, 16), so that
// scores are computed with positions in lanes, without shuffling. In q8_0 each 32 values of a position share a scale,
// f16, in a second array of the same layout: of values (256, h / 32), of keys (16, h / 32, 16).
//
// For a query: score[p] = the chain of fused multiply-adds key[d] * q[d] over d, p in lanes; probabilities are
// exp(score - greatest), summed lane by lane over the vectors of 16 positions, then the lanes; the result is the chain
// over positions of probability * value, divided by the sum. Positions that a query may not see count as probability
// zero and change nothing, so a row's bits do not depend on the rows that are computed with it.

#pragma once

#include "ops.h"
#include "linear.h"

constexpr int BLOCK_ROWS = 256;
constexpr int KV_GROUP = 32;

enum KVType : int64_t { KV_F32, KV_F16, KV_BF16, KV_Q8_0, KV_TYPE_COUNT };

struct KVShape {
    int64_t type;  // a KVType
    int64_t n_layer, n_head_kv, head_dim;
};

struct Span {  // consecutive rows of one sequence
    int64_t position, rows;
    uint8_t* const* blocks;    // the sequence's blocks from position 0 on
    uint16_t* const* scales;   // of q8_0, else null
};

struct Batch {
    KVShape kv;
    int64_t rows, n_spans;
    const Span* spans;
};

// ---- How a kind of value is loaded and stored -----------------------------------------------------------------------

inline uint16_t to_half(float x) {  // to nearest even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (bits < 0x38800000) {  // subnormal: let the adder round to multiples of 2^-24
        const float rounded = bits_to_float(bits) + 0.5f;
        uint32_t low;
        std::memcpy(&low, &rounded, 4);
        return uint16_t(sign | (low - 0x3f000000));
    }
    return uint16_t(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}
inline uint16_t to_brain(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct KVFloat {
    using Value = float;
    static constexpr bool SCALED = false;
    static KV_INLINE V get(const Value* p) { return load(p); }
    static Value from(float x) { return x; }
};
struct KVHalf {
    using Value = uint16_t;
    static constexpr bool SCALED = false;
    static KV_INLINE V get(const Value* p) { return load_half(p); }
    static Value from(float x) { return to_half(x); }
};
struct KVBrain {
    using Value = uint16_t;
    static constexpr bool SCALED = false;
    static KV_INLINE V get(const Value* p) { return load_brain(p); }
    static Value from(float x) { return to_brain(x); }
};
struct KVByte {
    using Value = int8_t;
    static constexpr bool SCALED = true;
    static KV_INLINE V get(const Value* p) { return load_i8(p); }
    static Value from(float x) { return Value(std::min(127.0f, std::max(-127.0f, std::nearbyint(x)))); }
};

template <class F>
void with_kv(int64_t type, F&& f) {
    switch (type) {
        case KV_F32: return f(KVFloat{});
        case KV_F16: return f(KVHalf{});
        case KV_BF16: return f(KVBrain{});
        case KV_Q8_0: return f(KVByte{});
        default: return;
    }
}

// One key-value head of one layer in one block.
template <class E>
struct Head {
    typename E::Value* keys;
    typename E::Value* values;
    uint16_t* key_scales;
    uint16_t* value_scales;

    Head(const KVShape& kv, const Span& span, int64_t block, int64_t layer, int64_t head) {
        using Value = typename E::Value;
        const int64_t size = BLOCK_ROWS * kv.head_dim, n = size / KV_GROUP;
        const int64_t at = layer * 2 * kv.n_head_kv + head, values_at = at + kv.n_head_kv;
        Value* base = reinterpret_cast<Value*>(span.blocks[block]);
        keys = base + at * size, values = base + values_at * size;
        key_scales = E::SCALED ? span.scales[block] + at * n : nullptr;
        value_scales = E::SCALED ? span.scales[block] + values_at * n : nullptr;
    }
};

// Keys and values of one row, (J, h) each, to the caches: ``row`` counts in the span.
template <class E>
void write_row(const KVShape& kv, const Span& span, int64_t layer, int64_t row, const float* keys,
               const float* values) {
    const int64_t h = kv.head_dim, position = span.position + row;
    const int64_t slot = position % BLOCK_ROWS, panel = slot / LANES, lane = slot % LANES;
    for (int64_t j = 0; j < kv.n_head_kv; ++j, keys += h, values += h) {
        const Head<E> head(kv, span, position / BLOCK_ROWS, layer, j);
        if constexpr (E::SCALED) {
            const int64_t groups = h / KV_GROUP;
            for (int64_t g = 0; g < groups; ++g) {
                const auto put_group = [&](const float* from, uint16_t* scale, auto&& place) {
                    float most = 0;
                    for (int i = 0; i < KV_GROUP; ++i) most = std::max(most, std::fabs(from[i]));
                    *scale = to_half(most / 127);
                    const float step = half_to_float(*scale);
                    for (int i = 0; i < KV_GROUP; ++i) *place(i) = E::from(from[i] / (step > 0 ? step : 1));
                };
                put_group(keys + g * KV_GROUP, head.key_scales + (panel * groups + g) * LANES + lane, [&](int i) {
                    return head.keys + (panel * h + g * KV_GROUP + i) * LANES + lane;
                });
                put_group(values + g * KV_GROUP, head.value_scales + slot * groups + g,
                          [&](int i) { return head.values + slot * h + g * KV_GROUP + i; });
            }
        } else {
            for (int64_t d = 0; d < h; ++d) head.keys[(panel * h + d) * LANES + lane] = E::from(keys[d]);
            for (int64_t d = 0; d < h; ++d) head.values[slot * h + d] = E::from(values[d]);
        }
    }
}

// ---- Scores, probabilities, mixture ---------------------------------------------------------------------------------

// N queries (N, h) by two panels of keys: scores[query * stride + position].
template <class E, int N>
void score_panels(const Head<E>& head, int64_t panel, int64_t h, const float* q, float* scores, int64_t stride) {
    const typename E::Value* keys = head.keys + panel * h * LANES;
    V sums[N][2];
    unroll<N>([&](auto n) __attribute__((always_inline)) { sums[n][0] = sums[n][1] = zero(); });
    const int64_t step = E::SCALED ? KV_GROUP : h, groups = h / KV_GROUP;
    for (int64_t begin = 0; begin < h; begin += step) {
        V scale[2];
        if constexpr (E::SCALED) {
            const uint16_t* scales = head.key_scales + (panel * groups + begin / KV_GROUP) * LANES;
            scale[0] = load_half(scales), scale[1] = load_half(scales + groups * LANES);
        }
        for (int64_t d = begin; d < begin + step; ++d) {
            V key[2] = {E::get(keys + d * LANES), E::get(keys + (h + d) * LANES)};
            if constexpr (E::SCALED) key[0] = mul(key[0], scale[0]), key[1] = mul(key[1], scale[1]);
            unroll<N>([&](auto n) __attribute__((always_inline)) {
                const V input = splat(q[n * h + d]);
                sums[n][0] = fma(key[0], input, sums[n][0]);
                sums[n][1] = fma(key[1], input, sums[n][1]);
            });
        }
    }
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        store(scores + n * stride, sums[n][0]);
        store(scores + n * stride + LANES, sums[n][1]);
    });
}

// Scores of positions [0, end) to probabilities times their sum, which is returned; outside [first, last] they are 0.
inline float probabilities(float* scores, int64_t first, int64_t last, int64_t end) {
    for (int64_t at = first / LANES * LANES; at < first; ++at) scores[at] = -INFINITE;
    for (int64_t at = last + 1; at < std::min(end, (last / LANES + 1) * LANES); ++at) scores[at] = -INFINITE;
    V most = splat(-INFINITE);
    for (int64_t at = first / LANES * LANES; at <= last; at += LANES) most = max(most, load(scores + at));
    const V greatest = splat(max_lane(most));
    V sum = zero();
    std::fill(scores, scores + first / LANES * LANES, 0.0f);
    for (int64_t at = first / LANES * LANES; at <= last; at += LANES) {
        store(scores + at, exponential(sub(load(scores + at), greatest)));
        for (int64_t out = at; out < first; ++out) scores[out] = 0;
        for (int64_t out = std::max(at, last + 1); out < at + LANES; ++out) scores[out] = 0;
        sum = add(sum, load(scores + at));
    }
    std::fill(scores + (last / LANES + 1) * LANES, scores + end, 0.0f);
    return sum_lanes(sum);
}

// Adds positions [begin, end) of a block to sums of N queries by VECTORS vectors of the head: sums[query * h + ...].
template <class E, int N, int VECTORS>
void mix_values(const Head<E>& head, int64_t begin, int64_t end, int64_t h, int64_t d, const float* weights,
                int64_t stride, float* sums) {
    V sum[N][VECTORS];
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<VECTORS>([&](auto v) __attribute__((always_inline)) { sum[n][v] = load(sums + n * h + d + v * LANES); });
    });
    for (int64_t p = begin; p < end; ++p) {
        V value[VECTORS];
        unroll<VECTORS>([&](auto v) __attribute__((always_inline)) {
            value[v] = E::get(head.values + p * h + d + v * LANES);
            if constexpr (E::SCALED) {
                const uint16_t* scale = head.value_scales + p * (h / KV_GROUP) + (d + v * LANES) / KV_GROUP;
                value[v] = mul(value[v], splat(half_to_float(*scale)));
            }
        });
        unroll<N>([&](auto n) __attribute__((always_inline)) {
            const V weight = splat(weights[n * stride + p - begin]);
            unroll<VECTORS>([&](auto v) __attribute__((always_inline)) { sum[n][v] = fma(value[v], weight, sum[n][v]); });
        });
    }
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        unroll<VECTORS>([&](auto v) __attribute__((always_inline)) { store(sums + n * h + d + v * LANES, sum[n][v]); });
    });
}

constexpr int QUERIES = 6;  // at once

template <class F>
KV_INLINE void few_at_once(int64_t count, F&& f) {
    for (int64_t n = 0; n < count;) {
        switch (std::min<int64_t>(QUERIES, count - n)) {
            case 1: f(std::integral_constant<int, 1>{}, n), n += 1; break;
            case 2: f(std::integral_constant<int, 2>{}, n), n += 2; break;
            case 3: f(std::integral_constant<int, 3>{}, n), n += 3; break;
            case 4: f(std::integral_constant<int, 4>{}, n), n += 4; break;
            case 5: f(std::integral_constant<int, 5>{}, n), n += 5; break;
            default: f(std::integral_constant<int, QUERIES>{}, n), n += QUERIES;
        }
    }
}

struct AttentionShape {
    int64_t n_head, window;  // window 0: all before
    float scale;
};

// Rows [begin, begin + count) of a span for one key-value head. q and out are the batch's rows (H, h) from the span's
// first on, ``q_stride`` and ``out_stride`` apart.
template <class E>
void attend_rows(const KVShape& kv, const Span& span, int64_t layer, int64_t j, int64_t begin, int64_t count,
                 const AttentionShape& shape, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                 Scratch& scratch) {
    const int64_t h = kv.head_dim, G = shape.n_head / kv.n_head_kv, n = count * G;
    const int64_t position = span.position + begin;
    const auto first_seen = [&](int64_t p) { return shape.window ? std::max<int64_t>(0, p - shape.window + 1) : 0; };
    constexpr int64_t PAIR = 2 * LANES;
    const int64_t start = first_seen(position) / PAIR * PAIR;
    const int64_t end = ((position + count - 1) / PAIR + 1) * PAIR;
    const int64_t stride = end - start;
    float* queries = scratch.take(n * (2 * h + stride));
    float* scores = queries + n * h;
    float* sums = scores + n * stride;
    for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d < h; ++d)
            queries[i * h + d] = q[(begin + i / G) * q_stride + (j * G + i % G) * h + d] * shape.scale;
    for (int64_t p = start; p < end; p += PAIR) {
        const Head<E> head(kv, span, p / BLOCK_ROWS, layer, j);
        few_at_once(n, [&](auto few, int64_t i) {
            score_panels<E, decltype(few)::value>(head, p % BLOCK_ROWS / LANES, h, queries + i * h,
                                                  scores + i * stride + p - start, stride);
        });
    }
    std::fill_n(sums, n * h, 0.0f);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t p = position + i / G;
        queries[i] = probabilities(scores + i * stride, first_seen(p) - start, p - start, stride);  // queries are done
    }
    // Not past the last row: what lies there may be anything.
    for (int64_t p = start, seen = position + count; p < seen;) {
        const int64_t block = p / BLOCK_ROWS, last = std::min(seen, (block + 1) * BLOCK_ROWS);
        const Head<E> head(kv, span, block, layer, j);
        few_at_once(n, [&](auto few, int64_t i) {
            constexpr int N = decltype(few)::value;
            const float* weights = scores + i * stride + p - start;
            const int64_t from = p % BLOCK_ROWS, to = last - block * BLOCK_ROWS;
            int64_t d = 0;
            for (; d + 4 * LANES <= h; d += 4 * LANES)
                mix_values<E, N, 4>(head, from, to, h, d, weights, stride, sums + i * h);
            for (; d < h; d += LANES) mix_values<E, N, 1>(head, from, to, h, d, weights, stride, sums + i * h);
        });
        p = last;
    }
    for (int64_t i = 0; i < n; ++i) {
        float* place = out + (begin + i / G) * out_stride + (j * G + i % G) * h;
        for (int64_t d = 0; d < h; ++d) place[d] = sums[i * h + d] / queries[i];
    }
}

inline std::vector<std::unique_ptr<Scratch>>& thread_scratch(Pool& pool) {
    static std::vector<std::unique_ptr<Scratch>> scratch;
    while (int(scratch.size()) < pool.count()) scratch.push_back(std::make_unique<Scratch>());
    return scratch;
}

// Keys and values of all rows of a batch to their caches; (rows, J, h) each.
inline void write_kv(const Batch& batch, int64_t layer, const float* keys, const float* values, int64_t stride,
                     Pool& pool) {
    with_kv(batch.kv.type, [&](auto element) {
        int64_t at = 0;
        for (int64_t s = 0; s < batch.n_spans; at += batch.spans[s++].rows) {
            const Span& span = batch.spans[s];
            pool.run((span.rows + 15) / 16, [&](int, int64_t chunk) {
                for (int64_t row = chunk * 16; row < std::min(span.rows, chunk * 16 + 16); ++row)
                    write_row<decltype(element)>(batch.kv, span, layer, row, keys + (at + row) * stride,
                                                 values + (at + row) * stride);
            });
        }
    });
}

// Attention of all rows of a batch, whose keys and values were written before: q (rows, H, h) to out (rows, H, h).
inline void attend(const Batch& batch, int64_t layer, const AttentionShape& shape, const float* q, int64_t q_stride,
                   float* out, int64_t out_stride, Pool& pool) {
    struct Piece {
        const Span* span;
        int64_t at, begin, count;
    };
    static std::vector<Piece> pieces;
    pieces.clear();
    const int64_t G = shape.n_head / batch.kv.n_head_kv;
    int64_t at = 0;
    for (int64_t s = 0; s < batch.n_spans; at += batch.spans[s++].rows) {
        const Span& span = batch.spans[s];
        // A piece's scores stay in the second level of the cache.
        const int64_t most = 65536 / (G * (span.position + span.rows + 1));
        const int64_t step = std::clamp<int64_t>(most, 1, std::max<int64_t>(1, 4 * QUERIES / G));
        for (int64_t begin = 0; begin < span.rows; begin += step)
            pieces.push_back({&span, at, begin, std::min(step, span.rows - begin)});
    }
    auto& scratch = thread_scratch(pool);
    const int64_t J = batch.kv.n_head_kv;
    with_kv(batch.kv.type, [&](auto element) {
        pool.run(int64_t(pieces.size()) * J, [&](int thread, int64_t chunk) {
            const Piece& piece = pieces[size_t(chunk / J)];
            attend_rows<decltype(element)>(batch.kv, *piece.span, layer, chunk % J, piece.begin, piece.count, shape,
                                           q + piece.at * q_stride, q_stride, out + piece.at * out_stride, out_stride,
                                           *scratch[size_t(thread)]);
        });
    });
}
