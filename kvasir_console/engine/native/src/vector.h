// Sixteen f32 lanes, on AVX-512, AVX2 or whatever the compiler makes of vector extensions.
//
// Everything that rounds goes through these functions, and the source is compiled without contraction, so that a lane
// sees the same operations in every kernel of one build: that is what makes a row's bits independent of its company.
// Two builds may differ in the last bit (the portable one may lack a fused multiply-add).

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KV_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KV_AVX2 1
#include <immintrin.h>
#else
#define KV_PORTABLE 1
#endif

#if KV_AVX512 && defined(__AVX512VNNI__)
#define KV_LIMBS 1  // sums of byte products in one instruction: see limbs.h
#endif

#define KV_INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

// Calls f(0), f(1), ... f(N - 1) with compile-time indices.
template <class F, int... I>
KV_INLINE void unroll_over(F&& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
KV_INLINE void unroll(F&& f) {
    unroll_over(std::forward<F>(f), std::make_integer_sequence<int, N>{});
}

KV_INLINE float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// IEEE half to float: exact, subnormals and infinities included.
KV_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) {
        const float magnitude = float(rest) * 0x1p-24f;
        uint32_t bits;
        std::memcpy(&bits, &magnitude, 4);
        return bits_to_float(sign | bits);
    }
    return bits_to_float(sign | ((rest << 13) + (112u << 23)));
}

#if KV_AVX512

constexpr const char* ISA = "avx512";
using V = __m512;
using I = __m512i;

KV_INLINE V zero() { return _mm512_setzero_ps(); }
KV_INLINE V splat(float x) { return _mm512_set1_ps(x); }
KV_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
KV_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
KV_INLINE __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }
KV_INLINE V load_some(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
KV_INLINE void store_some(float* p, V v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
KV_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
KV_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
KV_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
KV_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
KV_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
KV_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }
KV_INLINE V min(V a, V b) { return _mm512_min_ps(a, b); }
KV_INLINE V negative(V a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
KV_INLINE V round_even(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n for integral n in [-126, 127].
KV_INLINE V power_of_two(V n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
KV_INLINE V load_half(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
KV_INLINE V load_brain(const void* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
KV_INLINE V load_i8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
KV_INLINE V load_u8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
KV_INLINE I load_words(const void* p) { return _mm512_loadu_si512(p); }
KV_INLINE I shift_right(I words, int bits) { return _mm512_srl_epi32(words, _mm_cvtsi32_si128(bits)); }

// A value table of 16 entries, looked up by four bits of each lane.
struct Table16 {
    V entries;
    KV_INLINE explicit Table16(const float* values) : entries(load(values)) {}
    template <int SHIFT>
    KV_INLINE V at(I words) const {
        return _mm512_permutexvar_ps(SHIFT ? _mm512_srli_epi32(words, SHIFT) : words, entries);
    }
};
// A table of 4 entries, looked up by two bits.
struct Table4 {
    V entries;
    KV_INLINE explicit Table4(const float* values)
        : entries(_mm512_broadcast_f32x4(_mm_loadu_ps(values))) {}
    template <int SHIFT>
    KV_INLINE V at(I words) const {
        return _mm512_permutevar_ps(entries, SHIFT ? _mm512_srli_epi32(words, SHIFT) : words);
    }
};
// v, plus step where bit BIT of the lane's word is set.
template <int BIT>
KV_INLINE V add_where(V v, I words, V step) {
    return _mm512_mask_add_ps(v, _mm512_test_epi32_mask(words, _mm512_set1_epi32(int(1u << BIT))), v, step);
}

#if KV_LIMBS
// Integers, 16 lanes of 32 bits; sums wrap around.
KV_INLINE I integers(int32_t x) { return _mm512_set1_epi32(x); }
KV_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
KV_INLINE I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
template <int BITS>
KV_INLINE I shift_left(I a) { return BITS ? _mm512_slli_epi32(a, BITS) : a; }
KV_INLINE V to_float(I a) { return _mm512_cvtepi32_ps(a); }
// c + the four products of a lane's unsigned bytes in ``codes`` and signed ones in ``digits``.
KV_INLINE I add_products(I codes, I digits, I c) { return _mm512_dpbusd_epi32(c, codes, digits); }
// Four fields, one in each byte: bits [FROM, FROM + BITS) of the bytes of ``words``, moved to bit TO and up.
template <int BITS, int FROM, int TO>
KV_INLINE I byte_fields(I words) {
    constexpr int up = TO - FROM;
    if constexpr (up > 0) words = _mm512_slli_epi32(words, up);
    if constexpr (up < 0) words = _mm512_srli_epi32(words, -up);
    return _mm512_and_si512(words, _mm512_set1_epi32(((1 << BITS) - 1) * 0x01010101 << TO));
}
KV_INLINE I either(I a, I b) { return _mm512_or_si512(a, b); }
// Entries of a table of 16 bytes, looked up by every byte (0..15).
KV_INLINE I byte_entries(const uint8_t* table, I bytes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), bytes);
}
// The floats of byte BYTE (unsigned) of every lane.
template <int BYTE>
KV_INLINE V byte_to_float(I words) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, BYTE * 8), _mm512_set1_epi32(255)));
}
#endif

#elif KV_AVX2

constexpr const char* ISA = "avx2";
struct V { __m256 a, b; };
struct I { __m256i a, b; };

KV_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KV_INLINE V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KV_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KV_INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
KV_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
KV_INLINE V add(V a, V b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
KV_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
KV_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
KV_INLINE V div(V a, V b) { return {_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
KV_INLINE V max(V a, V b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
KV_INLINE V min(V a, V b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
KV_INLINE V negative(V v) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(v.a, sign), _mm256_xor_ps(v.b, sign)};
}
KV_INLINE V round_even(V v) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(v.a, mode), _mm256_round_ps(v.b, mode)};
}
KV_INLINE __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
KV_INLINE V power_of_two(V n) { return {power_of_two(n.a), power_of_two(n.b)}; }
KV_INLINE V load_half(const void* p) {
    const __m128i* halves = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
KV_INLINE V load_brain(const void* p) {
    const __m128i* halves = static_cast<const __m128i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)), 16))};
}
KV_INLINE V load_i8(const void* p) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
KV_INLINE V load_u8(const void* p) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
KV_INLINE I load_words(const void* p) {
    const __m256i* words = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
KV_INLINE I shift_right(I words, int bits) {
    const __m128i count = _mm_cvtsi32_si128(bits);
    return {_mm256_srl_epi32(words.a, count), _mm256_srl_epi32(words.b, count)};
}

struct Table16 {
    __m256 low, high;
    KV_INLINE explicit Table16(const float* values) : low(_mm256_loadu_ps(values)), high(_mm256_loadu_ps(values + 8)) {}
    template <int SHIFT>
    KV_INLINE __m256 half(__m256i words) const {
        const __m256i index = _mm256_srli_epi32(words, SHIFT);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - SHIFT));  // bit 3 of the index as sign
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), upper);
    }
    template <int SHIFT>
    KV_INLINE V at(I words) const {
        return {half<SHIFT>(words.a), half<SHIFT>(words.b)};
    }
};
struct Table4 {
    __m256 entries;
    KV_INLINE explicit Table4(const float* values)
        : entries(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(values))) {}
    template <int SHIFT>
    KV_INLINE V at(I words) const {
        return {_mm256_permutevar_ps(entries, _mm256_srli_epi32(words.a, SHIFT)),
                _mm256_permutevar_ps(entries, _mm256_srli_epi32(words.b, SHIFT))};
    }
};
template <int BIT>
KV_INLINE __m256 step_where(__m256i words, __m256 step) {
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 31 - BIT), 31)), step);
}
template <int BIT>
KV_INLINE V add_where(V v, I words, V step) {
    return {_mm256_add_ps(v.a, step_where<BIT>(words.a, step.a)), _mm256_add_ps(v.b, step_where<BIT>(words.b, step.b))};
}

#else

constexpr const char* ISA = "portable";
typedef float V __attribute__((vector_size(64)));
typedef uint32_t I __attribute__((vector_size(64)));
typedef int32_t Signed __attribute__((vector_size(64)));

KV_INLINE V zero() { return V{}; }
KV_INLINE V splat(float x) { return V{} + x; }
KV_INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
KV_INLINE void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
KV_INLINE V fma(V a, V b, V c) {
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    V out;
    for (int i = 0; i < LANES; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
#else
    return a * b + c;
#endif
}
KV_INLINE V add(V a, V b) { return a + b; }
KV_INLINE V sub(V a, V b) { return a - b; }
KV_INLINE V mul(V a, V b) { return a * b; }
KV_INLINE V div(V a, V b) { return a / b; }
KV_INLINE V max(V a, V b) { return a > b ? a : b; }
KV_INLINE V min(V a, V b) { return a < b ? a : b; }
KV_INLINE V negative(V a) { return -a; }
KV_INLINE V round_even(V a) {
    const V big = splat(0x1.8p23f);  // |a| < 2^22 for every caller
    return (a + big) - big;
}
KV_INLINE V power_of_two(V n) {
    const Signed exponent = (__builtin_convertvector(n, Signed) + 127) << 23;
    V out;
    std::memcpy(&out, &exponent, sizeof out);
    return out;
}
KV_INLINE V load_half(const void* p) {
    uint16_t halves[LANES];
    std::memcpy(halves, p, sizeof halves);
    V out;
    for (int i = 0; i < LANES; ++i) out[i] = half_to_float(halves[i]);
    return out;
}
KV_INLINE V load_brain(const void* p) {
    uint16_t halves[LANES];
    std::memcpy(halves, p, sizeof halves);
    V out;
    for (int i = 0; i < LANES; ++i) out[i] = bits_to_float(uint32_t(halves[i]) << 16);
    return out;
}
template <class Byte>
KV_INLINE V load_bytes(const void* p) {
    Byte bytes[LANES];
    std::memcpy(bytes, p, sizeof bytes);
    V out;
    for (int i = 0; i < LANES; ++i) out[i] = float(bytes[i]);
    return out;
}
KV_INLINE V load_i8(const void* p) { return load_bytes<int8_t>(p); }
KV_INLINE V load_u8(const void* p) { return load_bytes<uint8_t>(p); }
KV_INLINE I load_words(const void* p) {
    I words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
KV_INLINE I shift_right(I words, int bits) { return words >> uint32_t(bits); }
template <int BITS>
struct Table {
    const float* values;
    KV_INLINE explicit Table(const float* entries) : values(entries) {}
    template <int SHIFT>
    KV_INLINE V at(I words) const {
        V out;
        for (int i = 0; i < LANES; ++i) out[i] = values[words[i] >> SHIFT & ((1 << BITS) - 1)];
        return out;
    }
};
using Table16 = Table<4>;
using Table4 = Table<2>;
template <int BIT>
KV_INLINE V add_where(V v, I words, V step) {
    return v + __builtin_convertvector(words >> BIT & 1, V) * step;
}

#endif

#if !KV_AVX512
KV_INLINE V load_some(const float* p, int n) {
    float lanes[LANES] = {};
    std::memcpy(lanes, p, size_t(n) * 4);
    return load(lanes);
}
KV_INLINE void store_some(float* p, V v, int n) {
    float lanes[LANES];
    store(lanes, v);
    std::memcpy(p, lanes, size_t(n) * 4);
}
#endif

// The lanes added by halves, (0 + 8, 1 + 9, ...), then those by halves, and so on: always in this order.
KV_INLINE float sum_lanes(V v) {
#if KV_PORTABLE
    float x[LANES];
    store(x, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
    return x[0];
#else
#if KV_AVX512
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
    const __m256 eight = _mm256_add_ps(v.a, v.b);
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
}
KV_INLINE float max_lane(V v) {
    float x[LANES];
    store(x, v);
    float most = x[0];
    for (int i = 1; i < LANES; ++i) most = x[i] > most ? x[i] : most;
    return most;
}
