/* The update against torch.optim.AdamW, and the schedule at its corners. Expected values: PyTorch 2.13,
 * AdamW(lr = 0.02, betas = (0.9, 0.95), eps = 1e-8, foreach = False), five steps. */
#include "toy.h"

#include "fsdp/internal.h"
#include "fsdp/learning_rate.h"

static const float initial[8] = {-0x1.2ca2e8p-3f, 0x1.92811cp-1f,  0x1.e4c5cep-1f,  -0x1.1d45a6p+0f,
                                 0x1.b0d7a0p+0f,  -0x1.ca26e2p-1f, -0x1.6c28f8p-2f, 0x1.3b7da2p+0f};
static const float gradients[5][8] = {
    {0x1.6a361ap-10f, -0x1.139c84p-6f, 0x1.a06326p-9f, 0x1.5c2540p-10f, 0x1.67fca4p-10f, 0x1.3b49e2p-9f,
     0x1.c942e6p-7f, 0x1.b96472p-7f},
    {0x1.f35854p-3f, 0x1.4c32fep-6f, 0x1.f5def0p-3f, 0x1.9ed7e0p-3f, 0x1.6c5ef6p-3f, -0x1.77fc04p-4f,
     -0x1.770b96p-5f, -0x1.28be88p-4f},
    {0x1.47a618p+0f, -0x1.fcf640p-1f, 0x1.d0a20ep+0f, -0x1.34a888p-1f, 0x1.9d6480p+0f, 0x1.ee2178p+0f,
     -0x1.b0a43ap-2f, -0x1.54bb3ep-4f},
    {-0x1.3acad6p+3f, -0x1.8fcb10p+3f, -0x1.e1f998p+0f, 0x1.69d6eep+1f, 0x1.4e2af0p+0f, 0x1.a6ba32p+1f,
     -0x1.8be1ccp-1f, -0x1.272c6ep+3f},
    {-0x1.7ad2bcp+7f, 0x1.92417ap+6f, -0x1.15f054p+6f, 0x1.6a7dc4p+6f, 0x1.572c34p+3f, 0x1.ea0366p+5f,
     0x1.07b762p+5f, -0x1.5e830ap+6f},
};
static const float plain[8] = {-0x1.678b04p-3f, 0x1.a3170cp-1f,  0x1.d13d7cp-1f,  -0x1.29379ap+0f,
                               0x1.9d224ep+0f,  -0x1.e05810p-1f, -0x1.63710cp-2f, 0x1.43408cp+0f};
static const float decayed[8] = {-0x1.63f66ap-3f, 0x1.9ef87ep-1f,  0x1.cc913ap-1f,  -0x1.2650e4p+0f,
                                 0x1.98e894p+0f,  -0x1.dbb428p-1f, -0x1.5fcc90p-2f, 0x1.401c48p+0f};
static const float moment1[8] = {-0x1.3b4796p+4f, 0x1.1b4232p+3f, -0x1.bcfb22p+2f, 0x1.290c12p+3f,
                                 0x1.557102p+0f,  0x1.a49f10p+2f, 0x1.98592cp+1f,  -0x1.3354dap+3f};
static const float moment2[8] = {0x1.c1a0b0p+10f, 0x1.008e9cp+9f, 0x1.e37394p+7f, 0x1.9b05c2p+8f,
                                 0x1.7cd22cp+2f,  0x1.788cb8p+7f, 0x1.b2f4f2p+5f, 0x1.83f9a4p+8f};

static void check_close(const float *got, const float *expected) {
    for (int i = 0; i < 8; i++) assert_true(fabsf(got[i] - expected[i]) <= 3e-7f * fabsf(expected[i]));
}

TEST(follows_pytorch) {
    for (int variant = 0; variant < 4; variant++) {
        float p[8], m[8] = {0}, v[8] = {0}, g[8];
        memcpy(p, initial, sizeof p);
        tagc_adamw adamw = {.lr = 0.02, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8};
        adamw.weight_decay = variant % 2 ? 0.1 : 0;
        adamw.gradient_scale = variant < 2 ? 1 : 0.25;
        for (int step = 0; step < 5; step++) {
            for (int i = 0; i < 8; i++) g[i] = gradients[step][i] / (float)adamw.gradient_scale; /* exact */
            adamw.n_updates++;
            tagc_adamw_update(&adamw, p, m, v, g, 8);
        }
        check_close(p, variant % 2 ? decayed : plain);
        check_close(m, moment1);
        check_close(v, moment2);
    }
}

/* Where beta1 is 0 the gradient itself counts. A first moment that is there becomes the gradient, as torch's does, so that
 * beta1 may rise again. */
TEST(no_momentum_is_exact) {
    float m[8], with[8], expected[8];
    tagc_adamw adamw = {
        .lr = 0.02, .beta1 = 0, .beta2 = 0.95, .epsilon = 1e-8, .gradient_scale = 1, .n_updates = 1};
    for (int i = 0; i < 8; i++) expected[i] = initial[i] - 0.02f * (gradients[0][i] > 0 ? 1.0f : -1.0f);
    for (int has_moment = 1; has_moment >= 0; has_moment--) {
        float p[8], v[8] = {0};
        memcpy(p, initial, sizeof p);
        memcpy(m, gradients[4], sizeof m);
        tagc_adamw_update(&adamw, p, has_moment ? m : NULL, v, gradients[0], 8);
        for (int i = 0; i < 8; i++) assert_true(fabsf(p[i] - expected[i]) < 1e-6f);
        if (has_moment) {
            assert_memory_equal(m, gradients[0], sizeof m);
            memcpy(with, p, sizeof p);
        } else {
            assert_memory_equal(p, with, sizeof p);
        }
    }
}

TEST(sums_squares_in_double) {
    enum { N = 100003 };
    float *x = calloc(N, sizeof *x);
    for (size_t n = 0; n < N; n = n < 40 ? n + 1 : n * 7) {
        double expected = 0;
        for (size_t i = 0; i < n; i++) {
            x[i] = toy_number(i) * 1e20f; /* squares overflow in fp32 */
            expected += (double)x[i] * (double)x[i];
        }
        assert_true(fabs(tagc_sum_of_squares(x, n) - expected) <= 1e-13 * expected);
    }
    x[5] = NAN;
    assert_true(isnan(tagc_sum_of_squares(x, 100)));
    free(x);
}

static double rate_of(tagc_rate_schedule schedule, uint64_t step, uint64_t n_warmup, uint64_t n_decay,
                      uint64_t n_steps, double last) {
    tagc_learning_rate rate = {schedule, n_warmup, n_decay, n_steps, 1.0, last};
    return tagc_learning_rate_at(&rate, step);
}

/* Of 100 steps, 20 of them warm-up. */
static double cosine_at(uint64_t step) {
    return rate_of(TAGC_RATE_COSINE, step, 20, 0, 100, 0.1);
}

static double wsd_at(uint64_t step) {
    return rate_of(TAGC_RATE_WSD, step, 20, 10, 100, 0.1);
}

TEST(schedule_rises_and_falls) {
    for (uint64_t step = 1; step <= 20; step++) { /* nanoGPT's: iteration 0 has 1 / (n + 1) */
        assert_true(fabs(cosine_at(step) - (double)step / 21) < 1e-12);
        assert_true(wsd_at(step) == cosine_at(step));
    }
    assert_true(fabs(cosine_at(40) - (0.1 + 0.9 * 0.8535533905932737)) < 1e-12);
    assert_true(fabs(cosine_at(60) - 0.55) < 1e-12);
    assert_true(cosine_at(100) == 0.1 && cosine_at(1000000) == 0.1);
    for (uint64_t step = 21; step < 110; step++) assert_true(cosine_at(step) >= cosine_at(step + 1));
    for (uint64_t step = 21; step <= 90; step++) assert_true(wsd_at(step) == 1.0);
    assert_true(fabs(wsd_at(91) - 0.91) < 1e-12 && fabs(wsd_at(99) - 0.19) < 1e-12 && wsd_at(100) == 0.1);
    /* No warm-up, all warm-up, and more decay than there are steps behind the warm-up. */
    assert_true(rate_of(TAGC_RATE_WSD, 1, 0, 10, 100, 0.1) == 1.0);
    assert_true(rate_of(TAGC_RATE_COSINE, 1, 0, 0, 100, 0.1) > 0.999);
    assert_true(fabs(rate_of(TAGC_RATE_COSINE, 5, 10, 0, 10, 0.1) - 5.0 / 11) < 1e-12);
    assert_true(fabs(rate_of(TAGC_RATE_WSD, 60, 20, 500, 100, 0.1) - 0.55) < 1e-12);
    assert_true(rate_of(TAGC_RATE_COSINE, 1, 0, 0, 1, 0.1) == 0.1); /* one step is the last */
}
