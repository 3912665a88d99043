// Whole decoder layers: attention, then a gated network or a mixture of them, each added to what came in.
//
//     x += post(attention(norm(x)))        post: another norm, or nothing
//     x += post(feed_forward(norm(x)))

#pragma once

#include "attention.h"
#include "experts.h"

struct Mixture {
    const Matrix* router;
    const Network* experts;  // all of them, by id
    int64_t n_used, normalised;
    double scale;
    int64_t* pairs;  // how many rows each expert was given, added to; or null
};

struct Layer {
    int64_t index;  // in the caches
    int64_t n_head, window;
    int64_t rope_dim, rope_halves, rope_table;  // which of the tables of turns
    double eps, attention_scale;
    const float* attn_norm;            // (D,)
    const float* qkv_bias;             // ((H + 2J) h,) or null
    const float* qk_norm;              // (H + J, h) or null
    const float* post_attention_norm;  // (D,) or null
    const float* ffn_norm;             // (D,)
    const float* post_ffn_norm;        // (D,) or null
    const Matrix* qkv;
    const Matrix* attn_output;
    const float* attn_output_bias;     // (D,) or null
    Network network;                   // of a dense layer
    const Mixture* mixture;            // null for a dense layer
};

// x += y, or x += norm(y).
inline void add_rows(float* x, int64_t x_stride, float* y, int64_t rows, int64_t width, const float* norm, float eps,
                     Pool& pool) {
    over_rows(pool, rows, width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            if (norm) rms_norm(y + r * width, norm, width, eps, y + r * width);
            add_to(x + r * x_stride, y + r * width, width);
        }
    });
}

// ``turns``: tables of (rows, rope_dim / 2) pairs of cosine and sine.
inline void attention_half(const Layer& layer, const Batch& batch, const float* const* turns, float* x,
                           int64_t x_stride, Pool& pool) {
    static Scratch scratch;
    const int64_t R = batch.rows, D = layer.qkv->n_in, H = layer.n_head, J = batch.kv.n_head_kv, h = batch.kv.head_dim;
    const int64_t W = (H + 2 * J) * h;
    const float eps = float(layer.eps);
    float* normed = scratch.take(R * (D + W + H * h));
    float* qkv = normed + R * D;
    float* mixed = qkv + R * W;
    norm_rows(x, x_stride, R, layer.attn_norm, D, eps, normed, D, pool);
    linear(*layer.qkv, normed, R, D, qkv, W, pool);
    const float* table = turns[layer.rope_table];
    over_rows(pool, R, W, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* row = qkv + r * W;
            if (layer.qkv_bias) add_to(row, layer.qkv_bias, W);
            if (layer.qk_norm)
                for (int64_t i = 0; i < H + J; ++i) rms_norm(row + i * h, layer.qk_norm + i * h, h, eps, row + i * h);
            rotate(row, H + J, h, table + r * layer.rope_dim, layer.rope_dim, layer.rope_halves);
        }
    });
    write_kv(batch, layer.index, qkv + H * h, qkv + (H + J) * h, W, pool);
    const AttentionShape shape{H, layer.window, float(layer.attention_scale)};
    attend(batch, layer.index, shape, qkv, W, mixed, H * h, pool);
    linear(*layer.attn_output, mixed, R, H * h, normed, D, pool);
    if (layer.attn_output_bias)
        for (int64_t r = 0; r < R; ++r) add_to(normed + r * D, layer.attn_output_bias, D);
    add_rows(x, x_stride, normed, R, D, layer.post_attention_norm, eps, pool);
}

inline void mixture_rows(const Mixture& mixture, const float* x, int64_t rows, int64_t width, float* out, Pool& pool) {
    static Scratch scratch;
    static std::vector<int64_t> ids, row_idx;
    static std::vector<float> weights;
    const int64_t E = mixture.router->n_out, K = mixture.n_used, pairs = rows * K;
    float* logits = scratch.take(rows * E + pairs * width);
    float* terms = logits + rows * E;
    linear(*mixture.router, x, rows, width, logits, E, pool);
    ids.resize(size_t(pairs)), row_idx.resize(size_t(pairs)), weights.resize(size_t(pairs));
    for (int64_t r = 0; r < rows; ++r) {
        route_row(logits + r * E, E, K, mixture.normalised, float(mixture.scale), &ids[size_t(r * K)],
                  &weights[size_t(r * K)]);
        std::fill_n(row_idx.begin() + r * K, K, r);
    }
    if (mixture.pairs)
        for (const int64_t id : ids) mixture.pairs[id] += 1;
    expert_outputs(mixture.experts, x, width, row_idx.data(), ids.data(), pairs, terms, pool);
    weighted_sum(terms, row_idx.data(), weights.data(), pairs, width, rows, out, width, pool);
}

inline void feed_forward_half(const Layer& layer, int64_t rows, float* x, int64_t x_stride, Pool& pool) {
    static Scratch scratch;
    const int64_t D = layer.qkv->n_in;
    const float eps = float(layer.eps);
    float* normed = scratch.take(rows * 2 * D);
    float* fed = normed + rows * D;
    norm_rows(x, x_stride, rows, layer.ffn_norm, D, eps, normed, D, pool);
    if (layer.mixture)
        mixture_rows(*layer.mixture, normed, rows, D, fed, pool);
    else
        pass_network(layer.network, normed, D, rows, fed, D, pool);
    add_rows(x, x_stride, fed, rows, D, layer.post_ffn_norm, eps, pool);
}
