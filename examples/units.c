/* A training loop with several units in flight: while the backward pass goes on to the next unit, gradients of those before
 * are reduced, and while the next forward pass begins, parameters of the rest are gathered. It fits parameters to a target
 * that every rank sees through noise of its own. Build and run: see README.md beside this file. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tagc/mpi.h>

enum { N_UNITS = 6, N_ELEMS = 100000, N_STEPS = 40 };

/* Each rank owns a shard of a unit: its optimizer has that alone, in fp32. */
typedef struct unit {
    tagc_reducer *reducer;
    tagc_gatherer *gatherer;
    size_t n, shard;
    float *target, *full, *gradient; /* (n): W shards */
    float *own, *mean;               /* (shard) */
} unit;

static void must(tagc_status status) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "%s: %s\n", tagc_status_name(status), tagc_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static float *zeros(size_t n) {
    float *array = calloc(n, sizeof *array);
    if (!array) MPI_Abort(MPI_COMM_WORLD, 1);
    return array;
}

static float uniform(void) {
    return (float)rand() / (float)RAND_MAX - 0.5f;
}

static void make(tagc_comm *comm, int number, unit *u) {
    tagc_reducer_options reduce;
    tagc_reducer_options_init(&reduce);
    reduce.n_elems = tagc_padded_elems(N_ELEMS, tagc_comm_world_size(comm));
    reduce.sparsity = 0; /* every value, in 4 bits; what they round off is added to the next gradient */
    reduce.format = TAGC_FORMAT_INT4;
    reduce.block = 32;
    reduce.tag = reduce.rounding_seed = (uint64_t)number;
    must(tagc_reducer_create(comm, &reduce, &u->reducer));

    tagc_gatherer_options gather;
    tagc_gatherer_options_init(&gather);
    gather.n_elems = reduce.n_elems;
    gather.format = TAGC_FORMAT_INT4; /* changes since the last gather */
    gather.delta = 1;
    gather.tag = (uint64_t)number;
    must(tagc_gatherer_create(comm, &gather, &u->gatherer));

    u->n = (size_t)reduce.n_elems;
    u->shard = u->n / (size_t)tagc_comm_world_size(comm);
    u->target = zeros(u->n), u->full = zeros(u->n), u->gradient = zeros(u->n);
    u->own = zeros(u->shard), u->mean = zeros(u->shard);
    srand((unsigned)number + 1); /* the same target on all ranks */
    for (size_t i = 0; i < N_ELEMS; i++) u->target[i] = uniform();
}

static void destroy(unit *u) {
    tagc_reducer_destroy(u->reducer);
    tagc_gatherer_destroy(u->gatherer);
    free(u->target), free(u->full), free(u->gradient);
    free(u->own), free(u->mean);
}

/* Needs the unit's parameters. Returns its loss. */
static double forward(const unit *u) {
    double sum = 0;
    for (size_t i = 0; i < u->n; i++) sum += (u->full[i] - u->target[i]) * (u->full[i] - u->target[i]);
    return sum;
}

static void backward(unit *u) {
    for (size_t i = 0; i < N_ELEMS; i++) u->gradient[i] = u->full[i] - u->target[i] + uniform();
}

static void update(unit *u) {
    for (size_t i = 0; i < u->shard; i++) u->own[i] -= 0.1f * u->mean[i];
}

static double step(unit units[], int is_first) {
    double loss = 0;
    for (int i = 0; i < N_UNITS; i++) {
        if (!is_first) must(tagc_gatherer_end(units[i].gatherer)); /* the others are still under way */
        loss += forward(&units[i]);
    }
    for (int i = N_UNITS - 1; i >= 0; i--) {
        backward(&units[i]);
        must(tagc_reducer_begin(units[i].reducer, units[i].gradient, units[i].n, units[i].mean,
                                units[i].shard));
    }
    for (int i = N_UNITS - 1; i >= 0; i--) { /* in the order in which they were begun */
        must(tagc_reducer_end(units[i].reducer, NULL));
        update(&units[i]);
    }
    for (int i = 0; i < N_UNITS; i++) /* in the order in which the forward pass needs them */
        must(tagc_gatherer_begin(units[i].gatherer, units[i].own, units[i].shard, units[i].full, units[i].n));
    return loss;
}

/* Whether all ranks have the parameters of rank 0, to the bit. */
static int are_alike(const unit units[]) {
    int alike = 1, all;
    for (int i = 0; i < N_UNITS; i++) {
        float *first = zeros(units[i].n);
        memcpy(first, units[i].full, units[i].n * sizeof *first);
        MPI_Bcast(first, (int)units[i].n, MPI_FLOAT, 0, MPI_COMM_WORLD);
        alike &= memcmp(first, units[i].full, units[i].n * sizeof *first) == 0;
        free(first);
    }
    MPI_Allreduce(&alike, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return all;
}

int main(int argc, char **argv) {
    int level;
    tagc_mpi_prepare();
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    if (level < MPI_THREAD_MULTIPLE) MPI_Abort(MPI_COMM_WORLD, 1); /* tagc's thread calls MPI, too */
    tagc_comm *comm;
    must(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm));
    int rank = tagc_comm_rank(comm);

    unit units[N_UNITS];
    for (int i = 0; i < N_UNITS; i++) make(comm, i, &units[i]);
    srand((unsigned)rank + 100); /* other noise on each */
    double first = 0, loss = 0;
    for (int s = 0; s < N_STEPS; s++) {
        loss = step(units, s == 0);
        if (s == 0) first = loss;
        if (rank == 0 && s % 10 == 9) printf("step %d: %.4f of the first loss\n", s + 1, loss / first);
    }
    for (int i = 0; i < N_UNITS; i++) must(tagc_gatherer_end(units[i].gatherer));

    uint64_t sent[TAGC_N_LEGS], received[TAGC_N_LEGS];
    tagc_comm_bytes(comm, sent, received, TAGC_N_LEGS);
    double n = (double)N_STEPS * N_UNITS * (double)units[0].n;
    int alike = are_alike(units);
    if (rank == 0)
        printf("%d ranks have %s parameters; bits per element and step: gradients %.2f, parameters %.2f\n",
               tagc_comm_world_size(comm), alike ? "equal" : "different",
               8 * (double)sent[TAGC_LEG_VALUES] / n, 8 * (double)sent[TAGC_LEG_GATHER] / n);

    for (int i = 0; i < N_UNITS; i++) destroy(&units[i]);
    tagc_comm_destroy(comm);
    MPI_Finalize();
    return alike ? 0 : 1;
}
