// Products of f32 rows with packed matrices: as f32 here, as integers where limbs.h has a way for the type.
//
// out[r][o] is summed like this, whatever the number of rows, threads or panels at work: for each group of inputs in
// order, part = the chain of fused multiply-adds value * x over the group's inputs in order; then
// total = fma(scale, part, total) and, if the type has offsets, total = fma(offset, sum of the group's x, total).
// A single row decodes weights into registers as it goes; several rows decode a piece of a few panels once and pass
// over it in tiles. Both do the above, lane by lane, and so agree to the bit.

#pragma once

#include "limbs.h"

// The shape of a tile: as many sums at once as registers hold. Wide tiles are for few rows.
#if KV_AVX512
constexpr int TILE_ROWS = 8, NARROW = 2, WIDE_ROWS = 4, WIDE = 4;
#else
constexpr int TILE_ROWS = 6, NARROW = 1, WIDE_ROWS = 3, WIDE = 2;
#endif
constexpr int TILE_VALUES = 4096;  // weights decoded at a time: with the rows of a tile, they fit the first cache

// ---- One row --------------------------------------------------------------------------------------------------------

// Several panels at once, to hide the latency of a multiply-add. Each lane's result is as in ``tile``.
template <class P, int PANELS>
void one_row(const uint8_t* panel, int64_t units, const float* x, const float* sums, float* out, int last_lanes) {
    using Q = typename P::Quants;
    using S = typename P::Scales;
    const Q quants{};
    const int64_t panel_bytes = P::panel_bytes(units), scales_at = units * Q::BYTES;
    V total[PANELS];
    unroll<PANELS>([&](auto p) __attribute__((always_inline)) { total[p] = zero(); });
    for (int64_t unit = 0; unit < units; ++unit, x += UNIT) {
        const uint8_t* fields = panel + unit * Q::BYTES;
        for (int group = 0; group < S::GROUPS; ++group) {
            V part[PANELS];
            unroll<PANELS>([&](auto p) __attribute__((always_inline)) { part[p] = zero(); });
            constexpr int pieces = PIECES / S::GROUPS;
            for (int i = group * pieces; i < (group + 1) * pieces; ++i) {
                typename Q::Piece piece[PANELS];
                unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                    piece[p] = quants.piece(fields + p * panel_bytes, i);
                    // The same place of the panels that come next: they lie too far apart for the processor to see.
                    for (int line = i * Q::BYTES / PIECES / 64 * 64; line < (i + 1) * Q::BYTES / PIECES; line += 64)
                        __builtin_prefetch(fields + (p + PANELS) * panel_bytes + line);
                });
                unroll<PIECE>([&](auto k) __attribute__((always_inline)) {
                    const V input = splat(x[i * PIECE + k]);
                    unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                        part[p] = fma(quants.template at<decltype(k)::value>(piece[p]), input, part[p]);
                    });
                });
            }
            unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                const uint8_t* scales = panel + p * panel_bytes + scales_at;
                total[p] = fma(S::scale(scales, unit, group), part[p], total[p]);
                if constexpr (S::OFFSETS)
                    total[p] = fma(S::offset(scales, unit, group), splat(sums[unit * S::GROUPS + group]), total[p]);
            });
        }
    }
    unroll<PANELS - 1>([&](auto p) __attribute__((always_inline)) { store(out + p * LANES, total[p]); });
    store_some(out + (PANELS - 1) * LANES, total[PANELS - 1], last_lanes);
}

template <class P>
void one_row_panels(const Segment& segment, int64_t begin, int64_t end, int64_t units, const float* x,
                    const float* sums, float* out) {
    const int64_t panel_bytes = P::panel_bytes(units);
    while (begin < end) {
        const int64_t left = end - begin;
        const int64_t step = left == 5 ? 3 : std::min<int64_t>(left, 4);
        const uint8_t* panel = segment.data + begin * panel_bytes;
        float* place = out + segment.column + begin * LANES;
        const int lanes = int(std::min<int64_t>(LANES, segment.n_out - (begin + step - 1) * LANES));
        switch (step) {
            case 4: one_row<P, 4>(panel, units, x, sums, place, lanes); break;
            case 3: one_row<P, 3>(panel, units, x, sums, place, lanes); break;
            case 2: one_row<P, 2>(panel, units, x, sums, place, lanes); break;
            default: one_row<P, 1>(panel, units, x, sums, place, lanes);
        }
        begin += step;
    }
}

// ---- Several rows ---------------------------------------------------------------------------------------------------

struct Decoded {  // some groups of PANELS panels: values[input][PANELS * 16], scales[group][...], offsets[group][...]
    alignas(64) float values[TILE_VALUES];
    alignas(64) float scales[TILE_VALUES / 16];
    alignas(64) float offsets[TILE_VALUES / 16];
    alignas(64) float totals[ROW_BLOCK * WIDE * LANES];  // [row][PANELS * 16]
#if KV_LIMBS
    LimbPanels limbs;
#endif
};

// One panel's units [first, first + count) to floats; ``width`` is the distance between inputs in the result. Meanwhile
// the bytes that are wanted next, from ``next`` on, are fetched: they come in pieces too short for the processor to see.
template <class P>
__attribute__((noinline)) void decode(const uint8_t* panel, int64_t units, int64_t first, int64_t count, int64_t width,
                                      float* values, float* scales, float* offsets, const uint8_t* next,
                                      const uint8_t* next_scales) {
    using Q = typename P::Quants;
    using S = typename P::Scales;
    const Q quants{};
    const uint8_t* all_scales = panel + units * Q::BYTES;
    for (int64_t unit = first; unit < first + count; ++unit, next += Q::BYTES) {
        for (int line = 0; line < Q::BYTES; line += 64) __builtin_prefetch(next + line);
        if constexpr (S::BYTES > 0) __builtin_prefetch(next_scales + (unit - first) * S::BYTES / S::PERIOD);
        for (int i = 0; i < PIECES; ++i, values += PIECE * width) {
            const auto piece = quants.piece(panel + unit * Q::BYTES, i);
            unroll<PIECE>([&](auto k) __attribute__((always_inline)) {
                store(values + k * width, quants.template at<decltype(k)::value>(piece));
            });
        }
        for (int group = 0; group < S::GROUPS; ++group, scales += width, offsets += width) {
            store(scales, S::scale(all_scales, unit, group));
            if constexpr (S::OFFSETS) store(offsets, S::offset(all_scales, unit, group));
        }
    }
}

// ROWS rows by PANELS decoded panels. ``sums`` is null if the type has no offsets.
template <int ROWS, int PANELS>
void tile(const Decoded& decoded, int64_t groups, int64_t group_inputs, const float* x, int64_t x_stride,
          const float* sums, int64_t sums_stride, float* totals) {
    constexpr int WIDTH = PANELS * LANES;
    const float* values = decoded.values;
    for (int64_t group = 0; group < groups; ++group) {
        V part[ROWS][PANELS];
        unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
            unroll<PANELS>([&](auto p) __attribute__((always_inline)) { part[r][p] = zero(); });
        });
        for (int64_t step = 0; step < group_inputs; step += 4, values += 4 * WIDTH, x += 4) {
            unroll<4>([&](auto k) __attribute__((always_inline)) {
                V value[PANELS];
                unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                    value[p] = load(values + k * WIDTH + p * LANES);
                });
                unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
                    const V input = splat(x[r * x_stride + k]);
                    unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                        part[r][p] = fma(value[p], input, part[r][p]);
                    });
                });
            });
        }
        unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
            const V scale = load(decoded.scales + group * WIDTH + p * LANES);
            float* place = totals + p * LANES;
            if (!sums)
                return unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
                    store(place + r * WIDTH, fma(scale, part[r][p], load(place + r * WIDTH)));
                });
            const V offset = load(decoded.offsets + group * WIDTH + p * LANES);
            unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
                const V total = fma(scale, part[r][p], load(place + r * WIDTH));
                store(place + r * WIDTH, fma(offset, splat(sums[r * sums_stride + group]), total));
            });
        });
    }
}

template <int PANELS>
void tile_of(int64_t rows, const Decoded& decoded, int64_t groups, int64_t group_inputs, const float* x,
             int64_t x_stride, const float* sums, int64_t sums_stride, float* totals) {
    const auto pass = [&](auto count) {
        constexpr int ROWS = decltype(count)::value;
        if constexpr (ROWS <= (PANELS == WIDE ? WIDE_ROWS : TILE_ROWS))
            tile<ROWS, PANELS>(decoded, groups, group_inputs, x, x_stride, sums, sums_stride, totals);
    };
    switch (rows) {
        case 1: return pass(std::integral_constant<int, 1>{});
        case 2: return pass(std::integral_constant<int, 2>{});
        case 3: return pass(std::integral_constant<int, 3>{});
        case 4: return pass(std::integral_constant<int, 4>{});
        case 5: return pass(std::integral_constant<int, 5>{});
        case 6: return pass(std::integral_constant<int, 6>{});
        case 7: return pass(std::integral_constant<int, 7>{});
        default: return pass(std::integral_constant<int, 8>{});
    }
}

struct RowsView {
    const float* x;
    int64_t count, stride;
    const float* sums;  // of groups
    int64_t sums_stride;
};

// ``n_panels`` panels, at most PANELS, from ``panel`` on.
template <class P, int PANELS>
void several_rows(const Segment& segment, int64_t panel, int64_t n_panels, int64_t units, const RowsView& rows,
                  float* out, int64_t out_stride, Decoded& decoded) {
    using S = typename P::Scales;
    constexpr int WIDTH = PANELS * LANES, UNITS = TILE_VALUES / (WIDTH * UNIT);
    const int64_t panel_bytes = P::panel_bytes(units), tiles = (rows.count + TILE_ROWS - 1) / TILE_ROWS;
    std::fill_n(decoded.totals, rows.count * WIDTH, 0.0f);
    if (n_panels < PANELS) {  // what is computed with them is thrown away, but must not be slow
        std::fill_n(decoded.values, TILE_VALUES, 0.0f);
        std::fill_n(decoded.scales, TILE_VALUES / 16, 0.0f);
        std::fill_n(decoded.offsets, TILE_VALUES / 16, 0.0f);
    }
    for (int64_t first = 0; first < units; first += UNITS) {
        const int64_t count = std::min<int64_t>(UNITS, units - first);
        for (int64_t p = 0; p < n_panels; ++p) {
            const uint8_t* data = segment.data + (panel + p) * panel_bytes;
            const int64_t then = first + count < units ? first + count : 0;
            const uint8_t* next = then ? data : data + n_panels * panel_bytes;
            decode<P>(data, units, first, count, WIDTH, decoded.values + p * LANES, decoded.scales + p * LANES,
                      decoded.offsets + p * LANES, next + then * P::Quants::BYTES,
                      next + units * P::Quants::BYTES + then * S::BYTES / S::PERIOD);
        }
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = share(rows.count, t, tiles), end = share(rows.count, t + 1, tiles);
            const float* sums = S::OFFSETS ? rows.sums + row * rows.sums_stride + first * S::GROUPS : nullptr;
            tile_of<PANELS>(end - row, decoded, count * S::GROUPS, UNIT / S::GROUPS,
                            rows.x + row * rows.stride + first * UNIT, rows.stride, sums, rows.sums_stride,
                            decoded.totals + row * WIDTH);
        }
    }
    const int64_t width = std::min<int64_t>(n_panels * LANES, segment.n_out - panel * LANES);
    for (int64_t r = 0; r < rows.count; ++r)
        std::copy_n(decoded.totals + r * WIDTH, width, out + r * out_stride + segment.column + panel * LANES);
}

template <class P>
void several_rows_panels(const Segment& segment, int64_t begin, int64_t end, int64_t units, const RowsView& rows,
                         float* out, int64_t out_stride, Decoded& decoded) {
    const bool wide = rows.count <= WIDE_ROWS;
    for (int64_t step; begin < end; begin += step) {
        if (wide && end - begin > NARROW) {
            step = std::min<int64_t>(WIDE, end - begin);
            several_rows<P, WIDE>(segment, begin, step, units, rows, out, out_stride, decoded);
        } else {
            step = std::min<int64_t>(NARROW, end - begin);
            several_rows<P, NARROW>(segment, begin, step, units, rows, out, out_stride, decoded);
        }
    }
}

// ---- Both -----------------------------------------------------------------------------------------------------------

// The sum of a group's inputs: lane by lane over its vectors, then the lanes.
KV_INLINE float group_sum(const float* x, int groups_per_unit) {
    return sum_lanes(groups_per_unit == 1 ? add(load(x), load(x + LANES)) : load(x));
}

// Whether a type is multiplied as integers.
template <class P>
constexpr bool by_limbs() {
#if KV_LIMBS
    return !P::Quants::FLOATS;
#else
    return false;
#endif
}

// Rows as the kernels want them: a whole number of units long, and with the sums of their groups where a segment of the
// matrix has offsets.
class Inputs {
public:
    Inputs(const Matrix& matrix, const float* x, int64_t rows, int64_t stride, Scratch& scratch, Pool& pool)
        : x_(x), rows_(rows), stride_(stride), units_(matrix.units()) {
        bool needed[2] = {}, floats = false, limbs = false;
        for (int64_t i = 0; i < matrix.n_segments; ++i)
            with_format(int32_t(matrix.segments[i].format), [&](auto packing) {
                using P = decltype(packing);
                if (by_limbs<P>()) limbs = true;
                else floats = true;
                if (P::Scales::OFFSETS && !by_limbs<P>()) needed[P::Scales::GROUPS - 1] = true;
            });
#if KV_LIMBS
        if (limbs) limbs_ = limb_rows(x, rows, stride, units_, pool);
        if (!floats) return;
#endif
        // Rows a multiple of 4 KiB apart would share the same few lines of the cache.
        const bool copied = matrix.n_in % UNIT || (rows > 2 && stride % 1024 == 0);
        const int64_t padded = units_ * UNIT + (copied ? LANES : 0);
        if (!copied && !needed[0] && !needed[1]) return;
        float* memory = scratch.take(rows * (copied * padded + 3 * units_));
        if (copied) stride_ = padded, x_ = memory;
        float* sums[2] = {memory + rows * copied * padded, memory + rows * (copied * padded + units_)};
        const auto arrange = [&](int, int64_t chunk) {
            const int64_t end = std::min(rows, (chunk + 1) * 16);
            for (int64_t r = chunk * 16; r < end; ++r) {
                if (copied) {
                    std::copy_n(x + r * stride, matrix.n_in, memory + r * padded);
                    std::fill(memory + r * padded + matrix.n_in, memory + (r + 1) * padded, 0.0f);
                }
                for (int groups = 1; groups <= 2; ++groups) {
                    if (!needed[groups - 1]) continue;
                    const int64_t n = units_ * groups;
                    for (int64_t g = 0; g < n; ++g)
                        sums[groups - 1][r * n + g] = group_sum(x_ + r * stride_ + g * (UNIT / groups), groups);
                }
            }
        };
        pool.run((rows + 15) / 16, arrange);
        sums_[0] = sums[0], sums_[1] = sums[1];
    }

#if KV_LIMBS
    const LimbRowsView& limbs() const { return limbs_; }
#endif
    RowsView view(int groups) const { return {x_, rows_, stride_, sums_[groups - 1], units_ * groups}; }

private:
    const float* x_;
    int64_t rows_, stride_, units_;
    const float* sums_[2] = {};
#if KV_LIMBS
    LimbRowsView limbs_{};
#endif
};

// Calls work(thread, segment, begin, end) for panels of all segments, a few at a time.
template <class F>
void over_panels(const Matrix& matrix, Pool& pool, int64_t step, F&& work) {
    int64_t total = 0;
    for (int64_t i = 0; i < matrix.n_segments; ++i) total += (panels_of(matrix.segments[i].n_out) + step - 1) / step;
    pool.run(total, [&](int thread, int64_t chunk) {
        const Segment* segment = matrix.segments;
        for (;; ++segment) {
            const int64_t panels = panels_of(segment->n_out), chunks = (panels + step - 1) / step;
            if (chunk < chunks) return work(thread, *segment, chunk * step, std::min(panels, (chunk + 1) * step));
            chunk -= chunks;
        }
    });
}

// (rows, n_in) by the matrix to (rows, n_out). The caller holds the pool's turn.
inline void linear(const Matrix& matrix, const float* x, int64_t rows, int64_t x_stride, float* out, int64_t out_stride,
                   Pool& pool) {
    static Scratch scratch;
    static std::vector<std::unique_ptr<Decoded>> decoded;
    while (int(decoded.size()) < pool.count()) decoded.push_back(std::make_unique<Decoded>());
    const int64_t units = matrix.units();
    int64_t panels = 0;
    for (int64_t i = 0; i < matrix.n_segments; ++i) panels += panels_of(matrix.segments[i].n_out);
    const int64_t step = pool.count() == 1 ? panels : std::clamp<int64_t>(panels / (4 * pool.count()), 4, 16) / 4 * 4;
    for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
        const int64_t count = std::min<int64_t>(ROW_BLOCK, rows - row);
        const Inputs inputs(matrix, x + row * x_stride, count, x_stride, scratch, pool);
        over_panels(matrix, pool, step, [&](int thread, const Segment& segment, int64_t begin, int64_t end) {
            with_format(int32_t(segment.format), [&](auto packing) {
                using P = decltype(packing);
#if KV_LIMBS
                if constexpr (by_limbs<P>()) {
                    limb_panels<P>(segment, begin, end, units, inputs.limbs(), out + row * out_stride, out_stride,
                                   decoded[size_t(thread)]->limbs);
                    return;
                }
#endif
                if constexpr (!by_limbs<P>()) {
                    const RowsView view = inputs.view(P::Scales::GROUPS);
                    if (count == 1)
                        one_row_panels<P>(segment, begin, end, units, view.x, view.sums, out + row * out_stride);
                    else
                        several_rows_panels<P>(segment, begin, end, units, view, out + row * out_stride, out_stride,
                                               *decoded[size_t(thread)]);
                }
            });
        });
    }
}
