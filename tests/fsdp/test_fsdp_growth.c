/* How large a residual is beside a gradient: parameters stand still (lr 0), so that gradients are known. */
#include "fsdp/internal.h"
#include "toy.h"

typedef struct growths {
    toy_model model;
    tagc_fsdp_options options;
    /* Of each parameter of the schedule: its residual's norm in gradients' norms. */
    double of_ranks[TOY_MAX_RANKS][64];
    size_t n;
} growths;

/* All ranks see the same samples, so that a rank's gradient is the mean gradient. The first window ends with the last step. */
static void fill_a_window(tagc_comm *comm, void *arg) {
    growths *g = arg;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, g->model.tensors, g->model.n_tensors, &g->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < 20; step++) {
        uint64_t first = (uint64_t)(step * g->model.n_samples);
        toy_forward(&g->model, f, 1, first, g->model.n_samples);
        toy_backward(&g->model, f, first, g->model.n_samples);
        CHECK_OK(tagc_fsdp_step(f, 0, NULL));
    }
    const tagc_schedule_sums *sums = (const tagc_schedule_sums *)(const void *)(f->model->own + 3);
    for (size_t i = 0; i < f->model->n_tensors; i++)
        g->of_ranks[tagc_comm_rank(comm)][f->model->full[i]] = sqrt(sums[i].residual / sums[i].gradient);
    if (tagc_comm_rank(comm) == 0) g->n = f->model->n_tensors;
    tagc_fsdp_destroy(f);
}

/* What 4 bits leave behind is then the same share of the gradient for any number of ranks and hosts, but for the borders of
 * shards. Owners that send sums round no second time where the mean is over a power of two. */
TEST(growth_does_not_depend_on_ranks_and_hosts) {
    static const struct {
        int world_size, sharding, n_local;
    } worlds[] = {
        {4, TAGC_SHARD_FULL, 1}, {2, TAGC_SHARD_NONE, 1}, {4, TAGC_SHARD_FULL, 2}, {8, TAGC_SHARD_HYBRID, 4}};
    growths first = {0};
    for (size_t v = 0; v < sizeof worlds / sizeof *worlds; v++) {
        growths g = {0};
        toy_gpt(&g.model, 2, 16, 0);
        tagc_fsdp_options_init(&g.options);
        g.options.policy = TAGC_POLICY_ALL;
        g.options.gentle = 1;
        g.options.sharding = worlds[v].sharding;
        g.options.ranks_per_host = worlds[v].n_local;
        g.options.two_level = worlds[v].sharding == TAGC_SHARD_FULL && worlds[v].n_local > 1;
        g.options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
        toy_run(worlds[v].world_size, fill_a_window, &g);
        if (v == 0) first = g;
        assert_true(g.n > 8);
        for (size_t i = 0; i < g.n; i++) {
            double growth = g.of_ranks[0][i], expected = first.of_ranks[0][i];
            assert_true(growth > 0.02 && growth < 0.3 && fabs(growth / expected - 1) < 0.1);
            for (int rank = 1; rank < worlds[v].world_size; rank++)
                assert_true(g.of_ranks[rank][i] == growth);
        }
    }
}
