// How packed weights lie in memory, and how sixteen of them become floats.
//
// Outputs lie in panels of 16, one output a lane. Along the inputs a panel is cut into units of 32. A panel begins with
// the quants of all its units and ends with its scales:
//
//     unit:  planes of bit fields, for each the 16 lanes' words one after the other:
//              4-bit plane   4 words of 8 inputs     256 bytes
//              2-bit plane   2 words of 16 inputs    128 bytes
//              1-bit plane   1 word of 32 inputs      64 bytes
//            or, for bytes and floats, 32 vectors of 16 values
//            Where bytes are multiplied as integers (limbs.h), they are a plane too: 8 words of 4 inputs
//     field: the even inputs of a piece of 8 make one vector of bytes, the odd ones the next, so that a shift and a mask
//            of a word yield four inputs. Of vector j, the field of byte b lies in bits (j * BITS) % 8 + b * 8 and up.
//     scales: see the classes below; nothing is rounded that the file did not round
//
// A weight is scale * value + offset, where the value is a small number (an integer, or an entry of the type's table)
// and scale and offset belong to a group of 16 or 32 inputs.

#pragma once

#include "vector.h"

constexpr int UNIT = 32;

enum Format : int32_t {
    FORMAT_F32, FORMAT_F16, FORMAT_BF16, FORMAT_Q4_0, FORMAT_Q4_1, FORMAT_Q5_0, FORMAT_Q5_1, FORMAT_Q8_0, FORMAT_Q2_K,
    FORMAT_Q3_K, FORMAT_Q4_K, FORMAT_Q5_K, FORMAT_Q6_K, FORMAT_IQ4_NL, FORMAT_IQ4_XS, FORMAT_MXFP4, FORMAT_COUNT
};

// ---- Quants ---------------------------------------------------------------------------------------------------------

// Each class: BYTES of a unit, a constructor that readies tables, and piece(unit, i): eight inputs' worth of fields,
// the i-th of a unit's four pieces, of which at<K>(piece) makes the 16 values of input K.
//
// Where there are integer products, also codes<J>(unit), the J-th vector of codes (one byte each). A code is the value
// plus 1 << ZERO_BITS (if ZERO_BITS is not 0). LIFTED: the codes are values, yet 1 << ZERO_BITS is taken off them for the
// sums to fit, and given back later. WIDE: values beyond +-16 (or +-32 with two groups).

constexpr int PIECE = 8, PIECES = UNIT / PIECE, VECTORS = 8;

// Where the field of input K of a piece begins, counted from the piece's first.
constexpr int field_at(int bits, int k) { return k % 2 * bits + k / 2 * 8; }

struct FloatValues {
    static constexpr bool FLOATS = true;
    static constexpr int BYTES = UNIT * LANES * 4;
    using Piece = const float*;
    static KV_INLINE Piece piece(const uint8_t* unit, int i) {
        return reinterpret_cast<const float*>(unit) + i * PIECE * LANES;
    }
    template <int K>
    static KV_INLINE V at(Piece piece) { return load(piece + K * LANES); }
};
struct HalfValues {
    static constexpr bool FLOATS = true;
    static constexpr int BYTES = UNIT * LANES * 2;
    using Piece = const uint8_t*;
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return unit + i * PIECE * LANES * 2; }
    template <int K>
    static KV_INLINE V at(Piece piece) { return load_half(piece + K * LANES * 2); }
};
struct BrainValues {
    static constexpr bool FLOATS = true;
    static constexpr int BYTES = UNIT * LANES * 2;
    using Piece = const uint8_t*;
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return unit + i * PIECE * LANES * 2; }
    template <int K>
    static KV_INLINE V at(Piece piece) { return load_brain(piece + K * LANES * 2); }
};
#if KV_LIMBS
struct ByteValues {  // each with 128 added
    static constexpr bool FLOATS = false, WIDE = true, LIFTED = false;
    static constexpr int BYTES = UNIT * LANES, ZERO_BITS = 7;
    struct Piece {
        I even, odd;
    };
    static KV_INLINE Piece piece(const uint8_t* unit, int i) {
        return {load_words(unit + i * 128), load_words(unit + i * 128 + 64)};
    }
    template <int K>
    static KV_INLINE V at(Piece piece) {
        return sub(byte_to_float<K / 2>(K % 2 ? piece.odd : piece.even), splat(128));
    }
    template <int J>
    static KV_INLINE I codes(const uint8_t* unit) { return load_words(unit + J * 64); }
};
#else
struct ByteValues {
    static constexpr bool FLOATS = false;
    static constexpr int BYTES = UNIT * LANES;
    using Piece = const uint8_t*;
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return unit + i * PIECE * LANES; }
    template <int K>
    static KV_INLINE V at(Piece piece) { return load_i8(piece + K * LANES); }
};
#endif

constexpr int PLANE4 = 256, PLANE2 = 128, PLANE1 = 64;

KV_INLINE I fields4(const uint8_t* plane, int piece) { return load_words(plane + piece * 64); }
KV_INLINE I fields2(const uint8_t* plane, int piece) {
    return shift_right(load_words(plane + piece / 2 * 64), piece % 2 * 4);
}
KV_INLINE I fields1(const uint8_t* plane, int piece) { return shift_right(load_words(plane), piece * 2); }

#if KV_LIMBS
// The J-th vector of a plane's fields, moved to bit TO of their bytes.
template <int J, int BITS, int TO>
KV_INLINE I field_vector(const uint8_t* plane) {
    return byte_fields<BITS, J * BITS % 8, TO>(load_words(plane + J * BITS / 8 * 64));
}
#endif

// Values of 0..15 that begin at ZERO.
template <int ZERO>
struct Counting {
    static constexpr int ZERO_BITS = ZERO ? 3 : 0;
    static constexpr bool WIDE = false;
    static const uint8_t* codes() { return nullptr; }
    static const float* values() {
        static constexpr float table[16] = {ZERO + 0,  ZERO + 1,  ZERO + 2,  ZERO + 3, ZERO + 4,  ZERO + 5,
                                            ZERO + 6,  ZERO + 7,  ZERO + 8,  ZERO + 9, ZERO + 10, ZERO + 11,
                                            ZERO + 12, ZERO + 13, ZERO + 14, ZERO + 15};
        return table;
    }
};
// ggml-common.h: kvalues_iq4nl.
struct NonLinear {
    static constexpr int ZERO_BITS = 7;
    static constexpr bool WIDE = true;
    static const uint8_t* codes() {
        static constexpr uint8_t table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
        return table;
    }
    static const float* values() {
        static constexpr float table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return table;
    }
};
// Twice the values of the 4-bit floats of the OCP microscaling formats: sign, two bits of exponent, one of mantissa.
struct SmallFloats {
    static constexpr int ZERO_BITS = 4;
    static constexpr bool WIDE = false;
    static const uint8_t* codes() {
        static constexpr uint8_t table[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
        return table;
    }
    static const float* values() {
        static constexpr float table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        return table;
    }
};

template <class Entries>
struct Bits4 {
    static constexpr bool FLOATS = false, WIDE = Entries::WIDE, LIFTED = false;
    static constexpr int BYTES = PLANE4, ZERO_BITS = Entries::ZERO_BITS;
    using Piece = I;
    Table16 table{Entries::values()};
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return fields4(unit, i); }
    template <int K>
    KV_INLINE V at(Piece piece) const { return table.template at<K * 4>(piece); }
#if KV_LIMBS
    template <int J>
    static KV_INLINE I codes(const uint8_t* unit) {
        const I bytes = field_vector<J, 4, 0>(unit);
        return Entries::codes() ? byte_entries(Entries::codes(), bytes) : bytes;
    }
#endif
};
struct Fields {
    I low, high;
};
template <int ZERO>
struct Bits5 {
    static constexpr bool FLOATS = false, WIDE = false, LIFTED = ZERO == 0;
    static constexpr int BYTES = PLANE4 + PLANE1, ZERO_BITS = 4;
    using Piece = Fields;
    Table16 table{Counting<ZERO>::values()};
    V step = splat(16);
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return {fields4(unit, i), fields1(unit + PLANE4, i)}; }
    template <int K>
    KV_INLINE V at(Piece piece) const { return add_where<field_at(1, K)>(table.template at<K * 4>(piece.low), piece.high, step); }
#if KV_LIMBS
    template <int J>
    static KV_INLINE I codes(const uint8_t* unit) {
        return either(field_vector<J, 4, 0>(unit), field_vector<J, 1, 4>(unit + PLANE4));
    }
#endif
};
struct Bits6 {
    static constexpr bool FLOATS = false, WIDE = false, LIFTED = false;
    static constexpr int BYTES = PLANE4 + PLANE2, ZERO_BITS = 5;
    using Piece = Fields;
    static const float* steps() {
        static constexpr float table[4] = {0, 16, 32, 48};
        return table;
    }
    Table16 table{Counting<-32>::values()};
    Table4 steps_{steps()};
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return {fields4(unit, i), fields2(unit + PLANE4, i)}; }
    template <int K>
    KV_INLINE V at(Piece piece) const {
        return add(table.template at<K * 4>(piece.low), steps_.template at<field_at(2, K)>(piece.high));
    }
#if KV_LIMBS
    template <int J>
    static KV_INLINE I codes(const uint8_t* unit) {
        return either(field_vector<J, 4, 0>(unit), field_vector<J, 2, 4>(unit + PLANE4));
    }
#endif
};
struct Bits2 {
    static constexpr bool FLOATS = false, WIDE = false, LIFTED = false;
    static constexpr int BYTES = PLANE2, ZERO_BITS = 0;
    using Piece = I;
    Table4 table{Counting<0>::values()};
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return fields2(unit, i); }
    template <int K>
    KV_INLINE V at(Piece piece) const { return table.template at<field_at(2, K)>(piece); }
#if KV_LIMBS
    template <int J>
    static KV_INLINE I codes(const uint8_t* unit) { return field_vector<J, 2, 0>(unit); }
#endif
};
struct Bits3 {
    static constexpr bool FLOATS = false, WIDE = false, LIFTED = false;
    static constexpr int BYTES = PLANE2 + PLANE1, ZERO_BITS = 2;
    using Piece = Fields;
    Table4 table{Counting<-4>::values()};
    V step = splat(4);
    static KV_INLINE Piece piece(const uint8_t* unit, int i) { return {fields2(unit, i), fields1(unit + PLANE2, i)}; }
    template <int K>
    KV_INLINE V at(Piece piece) const { return add_where<field_at(1, K)>(table.template at<field_at(2, K)>(piece.low), piece.high, step); }
#if KV_LIMBS
    template <int J>
    static KV_INLINE I codes(const uint8_t* unit) {
        return either(field_vector<J, 2, 0>(unit), field_vector<J, 1, 2>(unit + PLANE2));
    }
#endif
};

// ---- Scales ---------------------------------------------------------------------------------------------------------

// Each class: GROUPS of a unit (1 or 2), whether there are offsets, the BYTES of PERIOD units, and scale(scales, unit,
// group) and offset(...), f32 as ``gguf.quants`` rounds them.

struct NoScales {
    static constexpr int GROUPS = 1, PERIOD = 1, BYTES = 0;
    static constexpr bool OFFSETS = false;
    static KV_INLINE V scale(const uint8_t*, int64_t, int) { return splat(1); }
    static KV_INLINE V offset(const uint8_t*, int64_t, int) { return zero(); }
};
// A half per output and unit.
struct HalfScales {
    static constexpr int GROUPS = 1, PERIOD = 1, BYTES = 32;
    static constexpr bool OFFSETS = false;
    static KV_INLINE V scale(const uint8_t* s, int64_t unit, int) { return load_half(s + unit * BYTES); }
    static KV_INLINE V offset(const uint8_t*, int64_t, int) { return zero(); }
};
// Two halves.
struct HalfPairs {
    static constexpr int GROUPS = 1, PERIOD = 1, BYTES = 64;
    static constexpr bool OFFSETS = true;
    static KV_INLINE V scale(const uint8_t* s, int64_t unit, int) { return load_half(s + unit * BYTES); }
    static KV_INLINE V offset(const uint8_t* s, int64_t unit, int) { return load_half(s + unit * BYTES + 32); }
};
// A bfloat16, which a power of two always is: 2^(e - 128), half of what the file's exponent byte means, because the
// table of such a type holds doubled values.
struct BrainScales {
    static constexpr int GROUPS = 1, PERIOD = 1, BYTES = 32;
    static constexpr bool OFFSETS = false;
    static KV_INLINE V scale(const uint8_t* s, int64_t unit, int) { return load_brain(s + unit * BYTES); }
    static KV_INLINE V offset(const uint8_t*, int64_t, int) { return zero(); }
};
// 8 units: a half for all, then a signed byte per group.
template <int N>
struct SignedScales {
    static constexpr int GROUPS = N, PERIOD = 8, BYTES = 32 + 8 * N * 16;
    static constexpr bool OFFSETS = false;
    static KV_INLINE V scale(const uint8_t* s, int64_t unit, int group) {
        s += unit / 8 * BYTES;
        return mul(load_i8(s + 32 + (unit % 8 * N + group) * 16), load_half(s));
    }
    static KV_INLINE V offset(const uint8_t*, int64_t, int) { return zero(); }
};
// 8 units: two halves, then a byte of scale and a byte of offset per group; the offset is subtracted.
struct BytePairs {
    static constexpr int GROUPS = 1, PERIOD = 8, BYTES = 64 + 8 * 32;
    static constexpr bool OFFSETS = true;
    static KV_INLINE V scale(const uint8_t* s, int64_t unit, int) {
        s += unit / 8 * BYTES;
        return mul(load_u8(s + 64 + unit % 8 * 32), load_half(s));
    }
    static KV_INLINE V offset(const uint8_t* s, int64_t unit, int) {
        s += unit / 8 * BYTES;
        return negative(mul(load_u8(s + 64 + unit % 8 * 32 + 16), load_half(s + 32)));
    }
};
// 8 units of two groups: two halves, then for each group a byte with a scale in its low nibble and an offset above.
struct NibblePairs {
    static constexpr int GROUPS = 2, PERIOD = 8, BYTES = 64 + 16 * 16;
    static constexpr bool OFFSETS = true;
    static KV_INLINE V nibbles(const uint8_t* bytes, int shift) {
        uint8_t out[LANES];
        for (int i = 0; i < LANES; ++i) out[i] = uint8_t(bytes[i] >> shift & 15);
        return load_u8(out);
    }
    static KV_INLINE V scale(const uint8_t* s, int64_t unit, int group) {
        s += unit / 8 * BYTES;
        return mul(nibbles(s + 64 + (unit % 8 * 2 + group) * 16, 0), load_half(s));
    }
    static KV_INLINE V offset(const uint8_t* s, int64_t unit, int group) {
        s += unit / 8 * BYTES;
        return negative(mul(nibbles(s + 64 + (unit % 8 * 2 + group) * 16, 4), load_half(s + 32)));
    }
};

template <class Q, class S>
struct Packing {
    using Quants = Q;
    using Scales = S;
    static int64_t panel_bytes(int64_t units) {
        const int64_t bytes = units * Q::BYTES + (units + S::PERIOD - 1) / S::PERIOD * S::BYTES;
        return (bytes + 63) / 64 * 64;
    }
};

// Calls f(Packing<...>{}) for a format; false for an unknown one.
template <class F>
bool with_format(int32_t format, F&& f) {
    switch (format) {
        case FORMAT_F32: f(Packing<FloatValues, NoScales>{}); return true;
        case FORMAT_F16: f(Packing<HalfValues, NoScales>{}); return true;
        case FORMAT_BF16: f(Packing<BrainValues, NoScales>{}); return true;
        case FORMAT_Q4_0: f(Packing<Bits4<Counting<-8>>, HalfScales>{}); return true;
        case FORMAT_Q4_1: f(Packing<Bits4<Counting<0>>, HalfPairs>{}); return true;
        case FORMAT_Q5_0: f(Packing<Bits5<-16>, HalfScales>{}); return true;
        case FORMAT_Q5_1: f(Packing<Bits5<0>, HalfPairs>{}); return true;
        case FORMAT_Q8_0: f(Packing<ByteValues, HalfScales>{}); return true;
        case FORMAT_Q2_K: f(Packing<Bits2, NibblePairs>{}); return true;
        case FORMAT_Q3_K: f(Packing<Bits3, SignedScales<2>>{}); return true;
        case FORMAT_Q4_K: f(Packing<Bits4<Counting<0>>, BytePairs>{}); return true;
        case FORMAT_Q5_K: f(Packing<Bits5<0>, BytePairs>{}); return true;
        case FORMAT_Q6_K: f(Packing<Bits6, SignedScales<2>>{}); return true;
        case FORMAT_IQ4_NL: f(Packing<Bits4<NonLinear>, HalfScales>{}); return true;
        case FORMAT_IQ4_XS: f(Packing<Bits4<NonLinear>, SignedScales<1>>{}); return true;
        case FORMAT_MXFP4: f(Packing<Bits4<SmallFloats>, BrainScales>{}); return true;
        default: return false;
    }
}
