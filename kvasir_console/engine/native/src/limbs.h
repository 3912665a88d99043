// Products of rows with packed integers, as integers.
//
// A row's unit of 32 inputs becomes whole numbers of 23 bits, relative to the unit's largest magnitude: x is about
// X * power, where power is a power of two and |X| < 2^22. X is written in three signed digits of base 256, and one
// instruction multiplies the codes of 4 inputs and 16 outputs with the digits of one kind and adds them up. So
//
//     sum = (sum of codes * digit2) * 65536 + (... digit1) * 256 + (... digit0) - (1 << ZERO_BITS) * sum of X
//
// is exact in 32 bits for every group, in whatever order it is added: the bounds of formats.h say why (values of at most
// 16 times 32 inputs, or 32 times 16; those of WIDE types have the highest digit's sum apart). Then, in f32,
//
//     part = sum * power  (LIFTED: + 16 * power * sum of X)
//     total = scale * part + total, and, if the type has offsets, total = offset * (power * sum of X) + total
//
// lane by lane and group after group. Only the rounding of x, half a unit in 2^22 of the largest nearby, is not one that
// f32 products would have too. A unit with a value that is not finite has the power NaN, and so have all its products.

#pragma once

#include "matrix.h"

#if KV_LIMBS

constexpr int DIGITS = 3, FIXED_BITS = 22;

struct alignas(64) LimbUnit {  // of one row
    int32_t digits[DIGITS][VECTORS];  // the highest first; 4 inputs each, in the order of vectors of codes
    float power;
    int32_t totals[3];  // of X: the unit's, its two halves'
    float sums[3];  // the same, times power
    int32_t low_total;  // of the two lower digits alone, of the whole unit
};
static_assert(sizeof(LimbUnit) == 128);

inline void write_limbs(const float* x, LimbUnit& to) {
    const __m512i a = _mm512_castps_si512(load(x)), b = _mm512_castps_si512(load(x + LANES));
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i most = _mm512_max_epi32(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude));
    const int exponent = _mm512_reduce_max_epi32(most) >> 23;  // biased; of numbers without a sign, as integers
    if (exponent == 255) {
        std::memset(&to, 0, sizeof to);
        to.power = to.sums[0] = to.sums[1] = to.sums[2] = bits_to_float(0x7fc00000);
        return;
    }
    const int scaled = exponent < FIXED_BITS ? FIXED_BITS : exponent;  // so that both powers are normal numbers
    const V factor = splat(bits_to_float(uint32_t(254 + FIXED_BITS - 1 - scaled) << 23));
    to.power = bits_to_float(uint32_t(scaled - (FIXED_BITS - 1)) << 23);
    const __m512i limit = _mm512_set1_epi32((1 << FIXED_BITS) - 1);
    const auto fixed = [&](__m512i v) {
        const __m512i whole = _mm512_cvtps_epi32(mul(_mm512_castsi512_ps(v), factor));
        return _mm512_max_epi32(_mm512_min_epi32(whole, limit), sub(_mm512_setzero_si512(), limit));
    };
    const __m512i half = integers(128);
    __m512i low = fixed(a), high = fixed(b);
    to.totals[1] = _mm512_reduce_add_epi32(low), to.totals[2] = _mm512_reduce_add_epi32(high);
    to.totals[0] = to.totals[1] + to.totals[2];
    for (int i = 0; i < 3; ++i) to.sums[i] = float(to.totals[i]) * to.power;
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15,
                                           0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int digit = DIGITS - 1; digit >= 0; --digit) {
        const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.digits[digit]), _mm256_shuffle_epi8(bytes, order));
        if (digit == 0) break;
        low = _mm512_srai_epi32(add(low, half), 8), high = _mm512_srai_epi32(add(high, half), 8);
    }
    to.low_total = to.totals[0] - _mm512_reduce_add_epi32(add(low, high)) * 65536;
}

// ---- What is left to do for a group, given its sums -----------------------------------------------------------------

// What a type's sums are like: its tiles are compiled once for all types of a kind.
template <int GROUPS_, int ZERO_BITS_, bool OFFSETS_, bool WIDE_, bool LIFTED_>
struct Kind {
    static constexpr int GROUPS = GROUPS_, ZERO_BITS = ZERO_BITS_;
    static constexpr bool OFFSETS = OFFSETS_, WIDE = WIDE_, LIFTED = LIFTED_;
    static_assert(!WIDE || (GROUPS == 1 && ZERO_BITS > 0));
};
template <class P>
using KindOf = Kind<P::Scales::GROUPS, P::Quants::ZERO_BITS, P::Scales::OFFSETS, P::Quants::WIDE, P::Quants::LIFTED>;

// Of a row, for one group: what is taken off the sums of every output, and what the parts are multiplied with.
template <class K>
struct GroupTerms {
    I zero{}, zero_high{};
    V power, sum{}, lift{};
    KV_INLINE GroupTerms(const LimbUnit& x, int group) : power(splat(x.power)) {
        const int which = K::GROUPS == 1 ? 0 : 1 + group;  // of totals and sums
        if constexpr (K::WIDE) {
            zero = shift_left<K::ZERO_BITS>(integers(x.low_total));
            zero_high = shift_left<K::ZERO_BITS>(integers((x.totals[0] - x.low_total) >> 16));
        } else if constexpr (K::ZERO_BITS > 0) {
            zero = shift_left<K::ZERO_BITS>(integers(x.totals[which]));
        }
        if constexpr (K::OFFSETS) sum = splat(x.sums[which]);
        if constexpr (K::LIFTED) lift = splat(x.sums[which] * float(1 << K::ZERO_BITS));
    }
    // ``high`` is the sum with the highest digit if the kind is WIDE, else nothing; ``low`` the rest.
    KV_INLINE V part(I high, I low) const {
        if constexpr (K::ZERO_BITS > 0) low = ::sub(low, zero);
        V value = to_float(low);
        if constexpr (K::WIDE) value = fma(to_float(::sub(high, zero_high)), splat(65536), value);
        return K::LIFTED ? fma(value, power, lift) : mul(value, power);
    }
    KV_INLINE V total(V before, V scale, V offset, V part) const {
        const V scaled = fma(scale, part, before);
        return K::OFFSETS ? fma(offset, sum, scaled) : scaled;
    }
};

// ---- One row --------------------------------------------------------------------------------------------------------

// Several panels at once, to hide the latency of an instruction.
template <class P, int PANELS>
void one_limb_row(const uint8_t* panel, int64_t units, const LimbUnit* x, float* out, int last_lanes) {
    using Q = typename P::Quants;
    using S = typename P::Scales;
    const int64_t panel_bytes = P::panel_bytes(units), scales_at = units * Q::BYTES;
    V total[PANELS];
    unroll<PANELS>([&](auto p) __attribute__((always_inline)) { total[p] = zero(); });
    for (int64_t unit = 0; unit < units; ++unit, ++x) {
        const uint8_t* fields = panel + unit * Q::BYTES;
        unroll<S::GROUPS>([&](auto which) __attribute__((always_inline)) {
            constexpr int group = decltype(which)::value;
            I sums[PANELS][DIGITS];
            unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                unroll<DIGITS>([&](auto digit) __attribute__((always_inline)) { sums[p][digit] = integers(0); });
                // The same place of the panels that come next: they lie too far apart for the processor to see.
                constexpr int begin = group * Q::BYTES / S::GROUPS / 64 * 64, end = (group + 1) * Q::BYTES / S::GROUPS;
                for (int line = begin; line < end; line += 64)
                    __builtin_prefetch(fields + (p + PANELS) * panel_bytes + line);
            });
            constexpr int each = VECTORS / S::GROUPS;
            unroll<each>([&](auto k) __attribute__((always_inline)) {
                constexpr int j = group * each + decltype(k)::value;
                I codes[PANELS];
                unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                    codes[p] = Q::template codes<j>(fields + p * panel_bytes);
                });
                unroll<DIGITS>([&](auto digit) __attribute__((always_inline)) {
                    const I four = integers(x->digits[digit][j]);
                    unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                        sums[p][digit] = add_products(codes[p], four, sums[p][digit]);
                    });
                });
            });
            const GroupTerms<KindOf<P>> terms(*x, group);
            unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                const uint8_t* scales = panel + p * panel_bytes + scales_at;
                const I first = sums[p][0];
                const I next = Q::WIDE ? sums[p][1] : add(shift_left<8>(first), sums[p][1]);
                const V part = terms.part(first, add(shift_left<8>(next), sums[p][2]));
                total[p] = terms.total(total[p], S::scale(scales, unit, group), S::offset(scales, unit, group), part);
            });
        });
    }
    unroll<PANELS - 1>([&](auto p) __attribute__((always_inline)) { store(out + p * LANES, total[p]); });
    store_some(out + (PANELS - 1) * LANES, total[PANELS - 1], last_lanes);
}

// How many of the panels that are left to take at once: never 1 of several.
inline int64_t limb_row_step(int64_t left) { return left == 5 ? 3 : std::min<int64_t>(left, 4); }

template <class P>
void one_limb_row_panels(const Segment& segment, int64_t begin, int64_t step, int64_t units, const LimbUnit* x,
                         float* out) {
    const uint8_t* panel = segment.data + begin * P::panel_bytes(units);
    float* place = out + segment.column + begin * LANES;
    const int lanes = int(std::min<int64_t>(LANES, segment.n_out - (begin + step - 1) * LANES));
    switch (step) {
        case 4: return one_limb_row<P, 4>(panel, units, x, place, lanes);
        case 3: return one_limb_row<P, 3>(panel, units, x, place, lanes);
        case 2: return one_limb_row<P, 2>(panel, units, x, place, lanes);
        default: return one_limb_row<P, 1>(panel, units, x, place, lanes);
    }
}

// ---- Several rows ---------------------------------------------------------------------------------------------------

// The shape of a tile: as many sums at once as registers hold. Fewer rows than LIMB_TILED are better passed one by one.
constexpr int LIMB_PANELS = 2, LIMB_ROWS = 8, LIMB_WIDE_ROWS = 6, LIMB_TILED = 4, LIMB_WIDTH = LIMB_PANELS * LANES;
constexpr int LIMB_UNITS = 8;  // of codes at a time: with the rows of a tile, they fit the first cache

struct LimbPanels {  // some units of panels side by side: codes[vector][panel], scales[group][panel], offsets[...]
    alignas(64) uint8_t codes[LIMB_UNITS * VECTORS * LIMB_PANELS * 64];
    alignas(64) float scales[LIMB_UNITS * 2 * LIMB_WIDTH];
    alignas(64) float offsets[LIMB_UNITS * 2 * LIMB_WIDTH];
    alignas(64) float totals[ROW_BLOCK * LIMB_WIDTH];  // [row][panel]
};

struct LimbRowsView {
    const LimbUnit* x;
    int64_t count, stride;  // in units
};

// One panel's units [first, first + count). Meanwhile the bytes that are wanted next, from
// ``next`` on, are fetched: they come in pieces too short for the processor to see.
template <class P>
__attribute__((noinline)) void decode_codes(const uint8_t* panel, int64_t units, int64_t first, int64_t count,
                                            uint8_t* codes, float* scales, float* offsets,
                                            const uint8_t* next, const uint8_t* next_scales) {
    using Q = typename P::Quants;
    using S = typename P::Scales;
    const uint8_t* all_scales = panel + units * Q::BYTES;
    for (int64_t unit = first; unit < first + count; ++unit, next += Q::BYTES) {
        for (int line = 0; line < Q::BYTES; line += 64) __builtin_prefetch(next + line);
        __builtin_prefetch(next_scales + (unit - first) * S::BYTES / S::PERIOD);
        unroll<VECTORS>([&](auto j) __attribute__((always_inline)) {
            _mm512_store_si512(codes + j * LIMB_PANELS * 64, Q::template codes<decltype(j)::value>(panel + unit * Q::BYTES));
        });
        codes += VECTORS * LIMB_PANELS * 64;
        for (int group = 0; group < S::GROUPS; ++group, scales += LIMB_WIDTH, offsets += LIMB_WIDTH) {
            store(scales, S::scale(all_scales, unit, group));
            if constexpr (S::OFFSETS) store(offsets, S::offset(all_scales, unit, group));
        }
    }
}

// ROWS rows by all the panels.
template <class K, int ROWS>
void limb_tile(const LimbPanels& panels, int64_t units, const LimbUnit* x, int64_t stride, float* totals) {
    constexpr int PANELS = LIMB_PANELS, WIDTH = LIMB_WIDTH, each = VECTORS / K::GROUPS;
    const uint8_t* codes = panels.codes;
    const float *scales = panels.scales, *offsets = panels.offsets;
    for (int64_t unit = 0; unit < units; ++unit, ++x) {
        for (int group = 0; group < K::GROUPS; ++group) {
            I high[ROWS][PANELS], sums[ROWS][PANELS];
            const auto over = [&](auto&& f) __attribute__((always_inline)) {
                unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
                    unroll<PANELS>([&](auto p) __attribute__((always_inline)) { f(r, p); });
                });
            };
            over([&](auto r, auto p) __attribute__((always_inline)) { sums[r][p] = integers(0); });
            unroll<DIGITS>([&](auto digit) __attribute__((always_inline)) {
                for (int j = 0; j < each; ++j) {
                    I four[PANELS];
                    unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                        four[p] = load_words(codes + (j * PANELS + p) * 64);
                    });
                    unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
                        const I digits = integers(x[r * stride].digits[digit][group * each + j]);
                        unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                            sums[r][p] = add_products(four[p], digits, sums[r][p]);
                        });
                    });
                }
                over([&](auto r, auto p) __attribute__((always_inline)) {
                    if (digit == 0 && K::WIDE)
                        high[r][p] = sums[r][p], sums[r][p] = integers(0);
                    else if (digit < DIGITS - 1)
                        sums[r][p] = shift_left<8>(sums[r][p]);
                });
            });
            codes += each * PANELS * 64;
            unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
                const GroupTerms<K> terms(x[r * stride], group);
                unroll<PANELS>([&](auto p) __attribute__((always_inline)) {
                    float* place = totals + r * WIDTH + p * LANES;
                    const V offset = K::OFFSETS ? load(offsets + p * LANES) : zero();
                    const V part = terms.part(K::WIDE ? high[r][p] : integers(0), sums[r][p]);
                    store(place, terms.total(load(place), load(scales + p * LANES), offset, part));
                });
            });
            scales += WIDTH, offsets += WIDTH;
        }
    }
}

template <class K>
void limb_tile_of(int64_t rows, const LimbPanels& panels, int64_t units, const LimbUnit* x, int64_t stride,
                  float* totals) {
    const auto pass = [&](auto count) {
        constexpr int ROWS = decltype(count)::value;
        if constexpr (!K::WIDE || ROWS <= LIMB_WIDE_ROWS) limb_tile<K, ROWS>(panels, units, x, stride, totals);
    };
    switch (rows) {  // of LIMB_TILED rows or more, shared out evenly, no tile has fewer than 3
        case 3: return pass(std::integral_constant<int, 3>{});
        case 4: return pass(std::integral_constant<int, 4>{});
        case 5: return pass(std::integral_constant<int, 5>{});
        case 6: return pass(std::integral_constant<int, 6>{});
        case 7: return pass(std::integral_constant<int, 7>{});
        default: return pass(std::integral_constant<int, 8>{});
    }
}

// ``n_panels`` panels, at most LIMB_PANELS, from ``panel`` on.
template <class P>
void several_limb_rows(const Segment& segment, int64_t panel, int64_t n_panels, int64_t units,
                       const LimbRowsView& rows, float* out, int64_t out_stride, LimbPanels& decoded) {
    using Q = typename P::Quants;
    using S = typename P::Scales;
    constexpr int MOST = Q::WIDE ? LIMB_WIDE_ROWS : LIMB_ROWS;
    const int64_t panel_bytes = P::panel_bytes(units), tiles = (rows.count + MOST - 1) / MOST;
    std::fill_n(decoded.totals, rows.count * LIMB_WIDTH, 0.0f);
    if (n_panels < LIMB_PANELS) {  // what is computed with them is thrown away, but must not be slow
        std::memset(decoded.codes, 0, sizeof decoded.codes);
        std::memset(decoded.scales, 0, sizeof decoded.scales);
        std::memset(decoded.offsets, 0, sizeof decoded.offsets);
    }
    for (int64_t first = 0; first < units; first += LIMB_UNITS) {
        const int64_t count = std::min<int64_t>(LIMB_UNITS, units - first);
        for (int64_t p = 0; p < n_panels; ++p) {
            const uint8_t* data = segment.data + (panel + p) * panel_bytes;
            const int64_t then = first + count < units ? first + count : 0;
            const uint8_t* next = then ? data : data + n_panels * panel_bytes;
            decode_codes<P>(data, units, first, count, decoded.codes + p * 64, decoded.scales + p * LANES,
                            decoded.offsets + p * LANES, next + then * Q::BYTES,
                            next + units * Q::BYTES + then * S::BYTES / S::PERIOD);
        }
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = share(rows.count, t, tiles), end = share(rows.count, t + 1, tiles);
            limb_tile_of<KindOf<P>>(end - row, decoded, count, rows.x + row * rows.stride + first, rows.stride,
                                    decoded.totals + row * LIMB_WIDTH);
        }
    }
    const int64_t width = std::min<int64_t>(n_panels * LANES, segment.n_out - panel * LANES);
    for (int64_t r = 0; r < rows.count; ++r)
        std::copy_n(decoded.totals + r * LIMB_WIDTH, width, out + r * out_stride + segment.column + panel * LANES);
}

template <class P>
void limb_panels(const Segment& segment, int64_t begin, int64_t end, int64_t units, const LimbRowsView& rows, float* out,
                 int64_t out_stride, LimbPanels& decoded) {
    const bool tiled = rows.count >= LIMB_TILED;
    for (int64_t step; begin < end; begin += step) {
        if (tiled) {
            step = std::min<int64_t>(LIMB_PANELS, end - begin);
            several_limb_rows<P>(segment, begin, step, units, rows, out, out_stride, decoded);
            continue;
        }
        step = limb_row_step(end - begin);
        for (int64_t r = 0; r < rows.count; ++r)
            one_limb_row_panels<P>(segment, begin, step, units, rows.x + r * rows.stride, out + r * out_stride);
    }
}

// Rows of f32 as limbs, kept until the next are made.
inline LimbRowsView limb_rows(const float* x, int64_t rows, int64_t x_stride, int64_t units, Pool& pool) {
    static Scratch scratch;
    const int64_t stride = units + 1;  // not a multiple of 4 KiB: such rows would share the same few lines of the cache
    LimbUnit* limbs = reinterpret_cast<LimbUnit*>(scratch.take(rows * stride * int64_t(sizeof(LimbUnit)) / 4));
    const int64_t step = std::max<int64_t>(1, 256 / units);
    pool.run((rows + step - 1) / step, [&](int, int64_t chunk) {
        for (int64_t r = chunk * step; r < std::min(rows, (chunk + 1) * step); ++r)
            for (int64_t unit = 0; unit < units; ++unit)
                write_limbs(x + r * x_stride + unit * UNIT, limbs[r * stride + unit]);
    });
    return {limbs, rows, stride};
}

#endif
