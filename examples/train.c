/* Trains a small network on all MPI ranks, with gradients that travel in few bits, an Adam of its own that is sharded over the ranks, and
 * checkpoints from which it goes on bit for bit:
 *
 *     mpirun -n 2 ./train 200 state          trains to step 200 and writes state.0 and state.1
 *     mpirun -n 2 ./train 400 state          goes on to step 400
 *
 * Tensors have odd sizes: where their parts lie in messages is the library's business. */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tagc/model.h>
#include <tagc/mpi.h>

enum { N_IN = 24, N_1 = 301, N_2 = 157, N_OUT = 5, BATCH = 16, N_TENSORS = 6, N_UNITS = 3, N_RANKS = 64 };

/* A weight and a bias for each layer. A layer is a unit: its gradients are sent while those below it are computed. */
static const int sizes[N_UNITS + 1] = {N_IN, N_1, N_2, N_OUT}; /* of layers */
static const char *names[N_TENSORS] = {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"};
static uint64_t shapes[N_TENSORS][2];
static tagc_tensor tensors[N_TENSORS];

static int rank, n_ranks;
static uint64_t n_elems[N_TENSORS], first[N_TENSORS], n_owned[N_TENSORS]; /* this rank's part */
static float *weights[N_TENSORS], *gradients[N_TENSORS];                  /* (n_elems) */
static float *sums[N_TENSORS], *moment1[N_TENSORS], *moment2[N_TENSORS];  /* (n_owned) */

static void stop_on(tagc_status status) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, tagc_status_name(status), tagc_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static float uniform(uint64_t *state) { /* in [-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) / 8388608.0f - 1.0f;
}

/* ---- the network: y = w2 tanh(w1 tanh(w0 x)), which learns a function of a few waves ---- */

static float acts[N_UNITS + 1][BATCH][N_1], errors[N_UNITS + 1][BATCH][N_1];

static void forward(int layer) {
    int n = sizes[layer], m = sizes[layer + 1];
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < m; i++) {
            float sum = weights[2 * layer + 1][i];
            for (int k = 0; k < n; k++) sum += weights[2 * layer][i * n + k] * acts[layer][b][k];
            acts[layer + 1][b][i] = layer < N_UNITS - 1 ? tanhf(sum) : sum;
        }
}

static void backward(int layer) { /* errors[layer + 1] are those of the sums */
    int n = sizes[layer], m = sizes[layer + 1];
    for (int t = 2 * layer; t < 2 * layer + 2; t++) memset(gradients[t], 0, n_elems[t] * sizeof(float));
    memset(errors[layer], 0, sizeof errors[layer]);
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < m; i++) {
            gradients[2 * layer + 1][i] += errors[layer + 1][b][i];
            for (int k = 0; k < n; k++) {
                gradients[2 * layer][i * n + k] += errors[layer + 1][b][i] * acts[layer][b][k];
                errors[layer][b][k] += errors[layer + 1][b][i] * weights[2 * layer][i * n + k];
            }
        }
    for (int b = 0; b < BATCH; b++)
        for (int k = 0; k < n; k++) errors[layer][b][k] *= 1 - acts[layer][b][k] * acts[layer][b][k];
}

static double batch(int step) { /* fills acts[0] and the errors of the output, and returns the loss */
    uint64_t state = (uint64_t)step * N_RANKS + (uint64_t)rank;
    double loss = 0;
    for (int i = 0; i < 8; i++) (void)uniform(&state);
    for (int b = 0; b < BATCH; b++)
        for (int k = 0; k < N_IN; k++) acts[0][b][k] = uniform(&state);
    for (int layer = 0; layer < N_UNITS; layer++) forward(layer);
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < N_OUT; i++) {
            float right = sinf(2 * acts[0][b][i]) + acts[0][b][i + 5] * acts[0][b][i + 10];
            errors[N_UNITS][b][i] = (acts[N_UNITS][b][i] - right) / (BATCH * N_OUT);
            loss += 0.5 * (double)((acts[N_UNITS][b][i] - right) * (acts[N_UNITS][b][i] - right)) /
                    (BATCH * N_OUT);
        }
    return loss;
}

/* ---- Adam, of what this rank owns; then all ranks get all weights ---- */

static void update(const tagc_model *model, int step) {
    for (uint32_t t = 0; t < N_TENSORS; t++) {
        double beta1, beta2;
        stop_on(
            tagc_model_betas(model, t, 0.9, 0.99, &beta1, &beta2)); /* shorter where values are selected */
        float scale1 = (float)(1 - pow(beta1, step + 1)), scale2 = (float)(1 - pow(beta2, step + 1));
        for (uint64_t i = 0; i < n_owned[t]; i++) {
            moment1[t][i] += (float)(1 - beta1) * (sums[t][i] - moment1[t][i]);
            moment2[t][i] += (float)(1 - beta2) * (sums[t][i] * sums[t][i] - moment2[t][i]);
            weights[t][first[t] + i] -=
                0.002f * (moment1[t][i] / scale1) / (sqrtf(moment2[t][i] / scale2) + 1e-8f);
        }
        int counts[N_RANKS], starts[N_RANKS];
        for (int r = 0; r < n_ranks; r++) {
            uint64_t start, n;
            stop_on(tagc_model_owned(model, r, t, &start, &n));
            starts[r] = (int)start, counts[r] = (int)n;
        }
        MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, weights[t], counts, starts, MPI_FLOAT, MPI_COMM_WORLD);
    }
}

/* ---- checkpoints: one file for each rank ---- */

static void move(FILE *file, void *bytes, size_t n, int is_load) {
    if ((is_load ? fread(bytes, 1, n, file) : fwrite(bytes, 1, n, file)) != n) MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Saves, or loads: then it returns the step, 0 without files. tagc_model_load is collective, so that all ranks have theirs, or none. */
static int checkpoint(tagc_model *model, const char *path, int step, int is_load) {
    FILE *file = fopen(path, is_load ? "rb" : "wb");
    size_t head[2] = {(size_t)step, 0};
    int n_missing = !file;
    MPI_Allreduce(MPI_IN_PLACE, &n_missing, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (n_missing == n_ranks && is_load) return 0;
    if (n_missing > 0) {
        if (!file)
            fprintf(stderr, "rank %d: %s cannot be opened: so on %d ranks of %d\n", rank, path, n_missing,
                    n_ranks);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    if (!is_load) stop_on(tagc_model_save(model, NULL, 0, &head[1]));
    move(file, head, sizeof head, is_load);
    void *bytes = malloc(head[1]);
    if (!is_load) stop_on(tagc_model_save(model, bytes, head[1], &head[1]));
    move(file, bytes, head[1], is_load);
    if (is_load) stop_on(tagc_model_load(model, (const void *const[]){bytes}, &head[1], 1));
    for (int t = 0; t < N_TENSORS; t++) {
        move(file, weights[t], n_elems[t] * sizeof(float), is_load);
        move(file, moment1[t], n_owned[t] * sizeof(float), is_load);
        move(file, moment2[t], n_owned[t] * sizeof(float), is_load);
    }
    if (fclose(file) != 0) MPI_Abort(MPI_COMM_WORLD, 1); /* a full disk */
    free(bytes);
    return (int)head[0];
}

int main(int argc, char **argv) {
    int level, n_steps = argc > 1 ? atoi(argv[1]) : 400;
    uint64_t state = 1, n_bytes = 0, n_all = 0;
    char path[256];
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    if (level < MPI_THREAD_MULTIPLE || n_ranks > N_RANKS)
        MPI_Abort(MPI_COMM_WORLD, 1); /* tagc's thread calls MPI, too */
    tagc_comm *comm;
    tagc_model *model;
    tagc_piece in[N_TENSORS], out[N_TENSORS]; /* where gradients are, and where sums go */
    tagc_model_options options;
    for (int t = 0; t < N_TENSORS; t++) {
        shapes[t][0] = (uint64_t)sizes[t / 2 + 1], shapes[t][1] = (uint64_t)sizes[t / 2];
        tensors[t] = (tagc_tensor){names[t], shapes[t], t % 2 ? 1 : 2, (uint32_t)t / 2, TAGC_CLASS_BY_NAME};
    }
    stop_on(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm));
    tagc_model_options_init(&options);
    options.schedule.moment = TAGC_MOMENT_SHORTENS; /* because update() takes the betas of tagc_model_betas */
    stop_on(tagc_model_create(NULL, comm, tensors, N_TENSORS, &options, &model));
    for (uint32_t t = 0; t < N_TENSORS; t++) {
        n_elems[t] = shapes[t][0] * (t % 2 ? 1 : shapes[t][1]);
        n_all += n_elems[t];
        stop_on(tagc_model_owned(model, rank, t, &first[t], &n_owned[t]));
        weights[t] = malloc(n_elems[t] * sizeof(float));
        gradients[t] = malloc(n_elems[t] * sizeof(float));
        sums[t] = calloc(n_owned[t] + 1, sizeof(float));
        in[t] = (tagc_piece){t, 0, n_elems[t], gradients[t]};
        out[t] = (tagc_piece){t, first[t], n_owned[t], sums[t]};
        moment1[t] = calloc(n_owned[t] + 1, sizeof(float));
        moment2[t] = calloc(n_owned[t] + 1, sizeof(float));
        for (uint64_t i = 0; i < n_elems[t]; i++)
            weights[t][i] = t % 2 ? 0 : uniform(&state) / sqrtf((float)shapes[t][1]);
    }
    snprintf(path, sizeof path, "%s.%d", argc > 2 ? argv[2] : "state", rank);
    int step = argc > 2 ? checkpoint(model, path, 0, 1) : 0;
    for (; step < n_steps; step++) {
        double loss = batch(step);
        for (int layer = N_UNITS - 1; layer >= 0; layer--) {
            backward(layer);
            stop_on(tagc_model_begin(model, (uint32_t)layer, in + 2 * layer, 2, out + 2 * layer, 2));
        }
        for (uint32_t unit = 0; unit < N_UNITS; unit++) {
            tagc_model_stats stats;
            tagc_model_stats_init(&stats);
            stop_on(tagc_model_end(model, unit, &stats));
            n_bytes += stats.n_bytes_sent;
        }
        update(model, step);
        stop_on(tagc_model_step(model, loss));
        if ((step + 1) % 100 != 0) continue;
        if (rank == 0)
            printf("step %d: loss %.6f, %.2f bits per gradient value\n", step + 1, loss,
                   0.08 * (double)n_bytes / (double)n_all);
        n_bytes = 0;
    }
    if (argc > 2) checkpoint(model, path, step, 0);
    tagc_model_destroy(model);
    tagc_comm_destroy(comm);
    return MPI_Finalize();
}
