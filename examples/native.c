/* Two processes that reduce gradients over TCP, without MPI: how tagc/native.h makes a comm. Here they are forks, which tell each
 * other addresses through pipes; ranks of a job use what it has, such as a store. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <tagc/native.h>
#include <unistd.h>

enum { W = 2, N_ELEMS = 1 << 16 };

static void must(tagc_status status) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "%s: %s\n", tagc_status_name(status), tagc_last_error());
    exit(1);
}

/* secrets[a][b] is what rank a shows to rank b. A job derives them from a secret of its own. */
static tagc_comm *connect_to(int rank, int to_other, int from_other,
                             unsigned char secrets[W][W][TAGC_NATIVE_KEY_BYTES]) {
    unsigned char addresses[W][TAGC_NATIVE_ADDRESS_BYTES], keys[W][2][TAGC_NATIVE_KEY_BYTES];
    tagc_native_options options;
    tagc_native_options_init(&options);
    options.local = "127.0.0.1"; /* both are on this host */
    tagc_native *native;
    must(tagc_native_open(&options, rank, W, &native));
    must(tagc_native_address(native, addresses[rank]));
    if (write(to_other, addresses[rank], sizeof *addresses) != sizeof *addresses ||
        read(from_other, addresses[1 - rank], sizeof *addresses) != sizeof *addresses)
        exit(1);
    for (int r = 0; r < W; r++) {
        memcpy(keys[r][0], secrets[rank][r], sizeof keys[r][0]);
        memcpy(keys[r][1], secrets[r][rank], sizeof keys[r][1]);
    }
    must(tagc_native_connect(native, addresses, keys, 60));
    tagc_comm *comm;
    must(tagc_comm_create_native(native, NULL, &comm)); /* it owns `native` now */
    return comm;
}

int main(void) {
    unsigned char secrets[W][W][TAGC_NATIVE_KEY_BYTES];
    int to_rank[W][2];
    if (getrandom(secrets, sizeof secrets, 0) != sizeof secrets || pipe(to_rank[0]) || pipe(to_rank[1]))
        return 1;
    pid_t child = fork(); /* before anything of tagc is made: threads do not survive a fork */
    if (child < 0) return 1;
    int rank = child == 0;
    tagc_comm *comm = connect_to(rank, to_rank[1 - rank][1], to_rank[rank][0], secrets);

    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = tagc_padded_elems(N_ELEMS, W);
    options.sparsity = 0; /* every value, in 8 bits */
    options.format = TAGC_FORMAT_INT8;
    tagc_reducer *reducer;
    must(tagc_reducer_create(comm, &options, &reducer));
    float *gradient = calloc(options.n_elems, sizeof *gradient),
          *mean = calloc(options.n_elems, sizeof *mean);
    if (!gradient || !mean) return 1;
    for (int i = 0; i < N_ELEMS; i++) gradient[i] = (float)(1 + 2 * rank); /* 1 and 3 */
    must(tagc_reducer_run(reducer, gradient, options.n_elems, mean, options.n_elems / W, NULL));
    printf("rank %d: the first value of its shard is %.2f\n", rank, (double)mean[0]);

    free(gradient);
    free(mean);
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
    int status = 0;
    return child > 0 && (waitpid(child, &status, 0) != child || status != 0);
}
