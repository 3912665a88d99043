// The operations between products. Each treats a row by itself, in an order that its length alone decides.

#pragma once

#include <algorithm>
#include <limits>

#include "vector.h"

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// e^x within two units in the last place; clamped to [e^-87, e^88], NaN stays NaN. After Cephes (Moshier, expf).
KV_INLINE V exponential(V x) {
    x = min(splat(88.0f), max(splat(-87.0f), x));  // a NaN comes through as the second operand
    const V n = round_even(mul(x, splat(1.44269504088896341f)));
    V r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    V p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), splat(1));
    return mul(p, power_of_two(n));
}

KV_INLINE V sigmoid(V x) { return div(splat(1), add(splat(1), exponential(negative(x)))); }

struct Silu {
    static KV_INLINE V of(V x) { return mul(x, sigmoid(x)); }
};
// The tanh form: 0.5 x (1 + tanh(u)) is x sigmoid(2u).
struct Gelu {
    static KV_INLINE V of(V x) {
        const V cube = mul(mul(x, x), x);
        return mul(x, sigmoid(mul(splat(1.5957691216057308f), fma(cube, splat(0.044715f), x))));
    }
};

// Calls f(at, lanes) for the vectors of ``count`` values.
template <class F>
KV_INLINE void over_vectors(int64_t count, F&& f) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) f(at, LANES);
    if (at < count) f(at, int(count - at));
}
KV_INLINE V take(const float* p, int lanes) { return lanes == LANES ? load(p) : load_some(p, lanes); }
KV_INLINE void put(float* p, V v, int lanes) {
    if (lanes == LANES)
        store(p, v);
    else
        store_some(p, v, lanes);
}

// out = x / sqrt(mean(x^2) + eps) * weight; ``weight`` may be null.
inline void rms_norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
    V squares = zero();
    over_vectors(width, [&](int64_t at, int lanes) __attribute__((always_inline)) {
        const V v = take(x + at, lanes);
        squares = fma(v, v, squares);
    });
    const V scale = splat(1.0f / std::sqrt(sum_lanes(squares) / float(width) + eps));
    over_vectors(width, [&](int64_t at, int lanes) __attribute__((always_inline)) {
        const V normed = mul(take(x + at, lanes), scale);
        put(out + at, weight ? mul(normed, take(weight + at, lanes)) : normed, lanes);
    });
}

// out = activation(gate) * up
template <class Activation>
inline void gated(const float* gate, const float* up, int64_t width, float* out) {
    over_vectors(width, [&](int64_t at, int lanes) __attribute__((always_inline)) {
        put(out + at, mul(Activation::of(take(gate + at, lanes)), take(up + at, lanes)), lanes);
    });
}

inline void add_to(float* x, const float* y, int64_t width) {
    for (int64_t i = 0; i < width; ++i) x[i] = x[i] + y[i];
}

// Turns the pairs of each head: (2i, 2i + 1), or (i, i + dim / 2) if ``halves``; turns are (cos, sin), dim / 2 of them.
inline void rotate(float* heads, int64_t n_heads, int64_t head_dim, const float* turns, int64_t dim, bool halves) {
    const int64_t n = dim / 2;
    for (int64_t head = 0; head < n_heads; ++head, heads += head_dim) {
        float* a = heads;
        float* b = heads + (halves ? n : 1);
        const int64_t step = halves ? 1 : 2;
        for (int64_t i = 0; i < n; ++i) {
            const float c = turns[2 * i], s = turns[2 * i + 1], x = a[i * step], y = b[i * step];
            a[i * step] = x * c - y * s;
            b[i * step] = x * s + y * c;
        }
    }
}
