// From the blocks of a GGUF to packed panels, and back to single rows.
//
// Block layouts are ggml's (ggml-common.h); ``gguf.quants`` is the reference for what they mean.

#pragma once

#include "linear.h"

struct BlockShape {
    int values, bytes;
};

inline BlockShape block_shape(int32_t format) {
    switch (format) {
        case FORMAT_F32: return {1, 4};
        case FORMAT_F16: return {1, 2};
        case FORMAT_BF16: return {1, 2};
        case FORMAT_Q4_0: return {32, 18};
        case FORMAT_Q4_1: return {32, 20};
        case FORMAT_Q5_0: return {32, 22};
        case FORMAT_Q5_1: return {32, 24};
        case FORMAT_Q8_0: return {32, 34};
        case FORMAT_Q2_K: return {256, 84};
        case FORMAT_Q3_K: return {256, 110};
        case FORMAT_Q4_K: return {256, 144};
        case FORMAT_Q5_K: return {256, 176};
        case FORMAT_Q6_K: return {256, 210};
        case FORMAT_IQ4_NL: return {32, 18};
        case FORMAT_IQ4_XS: return {256, 136};
        case FORMAT_MXFP4: return {32, 17};
        default: return {0, 0};
    }
}

// The unsigned bit fields of one block, input by input (for Q8_0 the signed bytes themselves).
inline void block_codes(int32_t format, const uint8_t* b, uint8_t* codes) {
    const auto nibbles32 = [](const uint8_t* q, uint8_t* to) {
        for (int i = 0; i < 16; ++i) to[i] = q[i] & 15, to[i + 16] = q[i] >> 4;
    };
    const auto nibbles64 = [](const uint8_t* q, uint8_t* to) {
        for (int i = 0; i < 32; ++i) to[i] = q[i] & 15, to[i + 32] = q[i] >> 4;
    };
    const auto fifth_bits = [](const uint8_t* mask, uint8_t* to) {
        for (int i = 0; i < 32; ++i) to[i] |= uint8_t((mask[i / 8] >> i % 8 & 1) << 4);
    };
    switch (format) {
        case FORMAT_Q4_0: case FORMAT_IQ4_NL: return nibbles32(b + 2, codes);
        case FORMAT_Q4_1: return nibbles32(b + 4, codes);
        case FORMAT_MXFP4: return nibbles32(b + 1, codes);
        case FORMAT_Q5_0: return nibbles32(b + 6, codes), fifth_bits(b + 2, codes);
        case FORMAT_Q5_1: return nibbles32(b + 8, codes), fifth_bits(b + 4, codes);
        case FORMAT_Q8_0: std::memcpy(codes, b + 2, 32); return;
        case FORMAT_Q2_K:
            for (int i = 0; i < 256; ++i) codes[i] = b[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
            return;
        case FORMAT_Q3_K:
            for (int i = 0; i < 256; ++i)
                codes[i] = uint8_t((b[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (b[i % 32] >> i / 32 & 1) << 2);
            return;
        case FORMAT_Q4_K:
            for (int j = 0; j < 4; ++j) nibbles64(b + 16 + j * 32, codes + j * 64);
            return;
        case FORMAT_Q5_K:
            for (int j = 0; j < 4; ++j) nibbles64(b + 48 + j * 32, codes + j * 64);
            for (int i = 0; i < 256; ++i) codes[i] |= uint8_t((b[16 + i % 32] >> i / 32 & 1) << 4);
            return;
        case FORMAT_Q6_K:
            for (int i = 0; i < 256; ++i) {
                const int half = i / 128, j = i % 128;
                const int low = b[half * 64 + j % 64] >> j / 64 * 4 & 15;
                codes[i] = uint8_t(low | (b[128 + half * 32 + j % 32] >> j / 32 * 2 & 3) << 4);
            }
            return;
        case FORMAT_IQ4_XS:
            for (int j = 0; j < 8; ++j) nibbles32(b + 8 + j * 16, codes + j * 32);
            return;
        default: return;
    }
}

inline void put_half(uint8_t* place, int lane, const uint8_t* half) { std::memcpy(place + lane * 2, half, 2); }

// One lane's scales of one block into the panel's scales; ``s`` is where the block's first period begins.
inline void block_scales(int32_t format, const uint8_t* b, int lane, uint8_t* s) {
    switch (format) {
        case FORMAT_Q4_0: case FORMAT_Q5_0: case FORMAT_Q8_0: case FORMAT_IQ4_NL: return put_half(s, lane, b);
        case FORMAT_Q4_1: case FORMAT_Q5_1: return put_half(s, lane, b), put_half(s + 32, lane, b + 2);
        case FORMAT_MXFP4: {
            const uint16_t brain = uint16_t(b[0] < 2 ? 0x20 << b[0] : (b[0] - 1) << 7);
            std::memcpy(s + lane * 2, &brain, 2);
            return;
        }
        case FORMAT_Q4_K: case FORMAT_Q5_K: {
            put_half(s, lane, b), put_half(s + 32, lane, b + 2);
            const uint8_t* p = b + 4;
            for (int j = 0; j < 4; ++j) {
                s[64 + j * 32 + lane] = p[j] & 63;
                s[64 + j * 32 + 16 + lane] = p[4 + j] & 63;
                s[64 + (j + 4) * 32 + lane] = uint8_t((p[8 + j] & 15) | (p[j] >> 2 & 48));
                s[64 + (j + 4) * 32 + 16 + lane] = uint8_t(p[8 + j] >> 4 | (p[4 + j] >> 2 & 48));
            }
            return;
        }
        case FORMAT_Q2_K:
            put_half(s, lane, b + 80), put_half(s + 32, lane, b + 82);
            for (int j = 0; j < 16; ++j) s[64 + j * 16 + lane] = b[j];
            return;
        case FORMAT_Q3_K: {
            put_half(s, lane, b + 108);
            const uint8_t* p = b + 96;
            for (int j = 0; j < 16; ++j) {
                const int low = p[j % 8] >> j / 8 * 4 & 15, high = p[8 + j % 4] >> j / 4 * 2 & 3;
                s[32 + j * 16 + lane] = uint8_t((low | high << 4) - 32);
            }
            return;
        }
        case FORMAT_Q6_K:
            put_half(s, lane, b + 208);
            for (int j = 0; j < 16; ++j) s[32 + j * 16 + lane] = b[192 + j];
            return;
        case FORMAT_IQ4_XS:
            put_half(s, lane, b);
            for (int j = 0; j < 8; ++j) {
                const int low = b[4 + j / 2] >> j % 2 * 4 & 15, high = (b[2] | b[3] << 8) >> 2 * j & 3;
                s[32 + j * 16 + lane] = uint8_t((low | high << 4) - 32);
            }
            return;
        default: return;
    }
}

// Fields of BITS bits of 32 codes of one lane, as formats.h lays them out; SHIFT is where they begin in a code.
template <int BITS, int SHIFT>
KV_INLINE void put_plane(const uint8_t* codes, int lane, uint8_t* plane) {
    uint32_t words[BITS] = {};
    for (int k = 0; k < UNIT; ++k) {
        const int vector = k / PIECE * 2 + k % 2, byte = k % PIECE / 2;
        const uint32_t field = codes[k] >> SHIFT & ((1 << BITS) - 1);
        words[vector * BITS / 8] |= field << (vector * BITS % 8 + byte * 8);
    }
    for (int word = 0; word < BITS; ++word) std::memcpy(plane + word * 64 + lane * 4, &words[word], 4);
}

// Rows of blocks, ``row_bytes`` apart, into consecutive panels from ``panel`` on. Lanes without a row are zero.
template <class P>
void pack_panel(int32_t format, const uint8_t* rows, int64_t count, int64_t row_bytes, int64_t n_in, uint8_t* panel) {
    using Q = typename P::Quants;
    using S = typename P::Scales;
    const BlockShape shape = block_shape(format);
    const int64_t units = (n_in + UNIT - 1) / UNIT;
    std::memset(panel, 0, size_t(P::panel_bytes(units)));
    if (shape.values == 1) {
        const int size = shape.bytes;
        for (int64_t k = 0; k < n_in; ++k)
            for (int64_t lane = 0; lane < count; ++lane)
                std::memcpy(panel + (k * LANES + lane) * size, rows + lane * row_bytes + k * size, size_t(size));
        return;
    }
    uint8_t* scales = panel + units * Q::BYTES;
    const int block_units = shape.values / UNIT;
    for (int64_t block = 0; block < n_in / shape.values; ++block)
        for (int64_t lane = 0; lane < count; ++lane) {
            const uint8_t* b = rows + lane * row_bytes + block * shape.bytes;
            uint8_t codes[256];
            block_codes(format, b, codes);
            block_scales(format, b, int(lane), scales + block * block_units / S::PERIOD * S::BYTES);
            for (int u = 0; u < block_units; ++u) {
                uint8_t* unit = panel + (block * block_units + u) * Q::BYTES;
                const uint8_t* c = codes + u * UNIT;
                if constexpr (std::is_same_v<Q, ByteValues>) {
#if KV_LIMBS
                    uint8_t lifted[UNIT];
                    for (int k = 0; k < UNIT; ++k) lifted[k] = uint8_t(c[k] + 128);
                    put_plane<8, 0>(lifted, int(lane), unit);
#else
                    for (int k = 0; k < UNIT; ++k) unit[k * LANES + lane] = c[k];
#endif
                } else if constexpr (Q::BYTES == PLANE2) {
                    put_plane<2, 0>(c, int(lane), unit);
                } else if constexpr (Q::BYTES == PLANE2 + PLANE1) {
                    put_plane<2, 0>(c, int(lane), unit), put_plane<1, 2>(c, int(lane), unit + PLANE2);
                } else {
                    put_plane<4, 0>(c, int(lane), unit);
                    if constexpr (Q::BYTES == PLANE4 + PLANE1) put_plane<1, 4>(c, int(lane), unit + PLANE4);
                    if constexpr (Q::BYTES == PLANE4 + PLANE2) put_plane<2, 4>(c, int(lane), unit + PLANE4);
                }
            }
        }
}

// One output's weights as ``gguf.quants`` computes them, scale * value + offset in two roundings: (n_in,).
template <class P>
void unpack_row(const uint8_t* panel, int lane, int64_t n_in, float* out) {
    using Q = typename P::Quants;
    using S = typename P::Scales;
    const int64_t units = (n_in + UNIT - 1) / UNIT;
    const uint8_t* scales_at = panel + units * Q::BYTES;
    for (int64_t unit = 0; unit < units; ++unit) {
        alignas(64) float values[UNIT][LANES], scales[S::GROUPS][LANES], offsets[S::GROUPS][LANES];
        decode<P>(panel, units, unit, 1, LANES, values[0], scales[0], offsets[0], panel, scales_at);
        const int64_t count = std::min<int64_t>(UNIT, n_in - unit * UNIT);
        for (int64_t k = 0; k < count; ++k) {
            const int64_t group = k * S::GROUPS / UNIT;
            float value = values[k][lane];
            if constexpr (S::BYTES > 0) value = value * scales[group][lane];
            if constexpr (S::OFFSETS) value = value + offsets[group][lane];
            out[unit * UNIT + k] = value;
        }
    }
}
