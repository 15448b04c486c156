/* Launches ranks: chooses the transport and the number of ranks, and prints the message if one fails. */
#include "launch/ranks.h"

#include "blas/blas.h"

#include "core/status.h"
#include "core/thread.h"
#include "transport/comm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if TAGC_HAVE_MPI
#include "tagc/mpi.h"
#endif

enum { TRACE_EVENTS = 1 << 18 };

/* Environment variables in which launchers pass the number of processes and the rank. */
static const char *const size_names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE",
                                         "PALS_NRANKS"};
static const char *const rank_names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK",
                                         "PALS_RANKID"};

static int launcher_number(const char *const names[4], int otherwise) {
    for (int i = 0; i < 4; i++) {
        const char *text = getenv(names[i]);
        if (text && *text) return atoi(text);
    }
    return otherwise;
}

int tagc_ranks_launcher_rank(void) {
    return launcher_number(rank_names, 0);
}

int tagc_ranks_launcher_size(void) {
    return launcher_number(size_names, 1);
}

int tagc_ranks_on_terminal(void) {
    return isatty(STDOUT_FILENO) && launcher_number(size_names, 0) == 0;
}

void tagc_ranks_complain(int rank, const char *text) {
    /* If all ranks fail alike, rank 0 prints, and its end kills the others before they print. */
    if (rank > 0) {
        long wait_ms = 2000 + 50 * (rank < 20 ? rank : 20);
        struct timespec pause = {.tv_sec = wait_ms / 1000, .tv_nsec = wait_ms % 1000 * 1000000};
        if (nanosleep(&pause, NULL) != 0)
            return; /* a signal: the job is being killed, so rank 0 has printed */
    }
    if (tagc_ranks_on_terminal()) fputs("\r\033[K", stdout); /* clears a progress line */
    fflush(stdout);
    fprintf(stderr, "tagc: %s\n", text);
    fflush(stderr);
}

static int exit_code(tagc_status status) {
    if (status == TAGC_OK) return TAGC_EXIT_OK;
    return status == TAGC_ERR_INTERRUPTED ? TAGC_EXIT_INTERRUPTED : TAGC_EXIT_FAILURE;
}

/* Rank 0 says what slows the products of all. */
static tagc_status prepare_products(const tagc_launch *launch, int n_callers, int n_ranks) {
    char text[TAGC_BLAS_TEXT_BYTES];
    tagc_blas_warning(text);
    if (*text && tagc_ranks_launcher_rank() == 0) tagc_ranks_complain(0, text);
    return tagc_blas_prepare(n_callers, n_ranks, launch->blas_threads);
}

/* Makes the trace and clock of a rank, and the options of its comm. */
static tagc_status prepare_rank(const tagc_launch *launch, tagc_rank *out, tagc_comm_options *options) {
    if (launch->trace) {
        TAGC_TRY(tagc_trace_create(TRACE_EVENTS, &out->trace));
        tagc_trace_pause(out->trace, 1);
    }
    TAGC_TRY(tagc_busy_create(out->trace, &out->busy));
    tagc_comm_options_init(options);
    options->timeout_s = launch->timeout_s;
    options->trace = tagc_busy_event;
    options->trace_context = out->busy;
    return TAGC_OK;
}

static void close_rank(tagc_rank *rank) {
    tagc_comm_destroy(rank->comm);
    tagc_busy_destroy(rank->busy);
    tagc_trace_destroy(rank->trace);
}

/* ---- ranks as threads ---- */

typedef struct local_job {
    const tagc_launch *launch;
    tagc_local_group *group;
    int n_ranks;
    tagc_rank_fn run;
    void *context;
    pthread_mutex_t lock;
    tagc_status first_failure; /* of the first rank to fail; the others repeat it */
    char first_text[TAGC_ERROR_TEXT_BYTES];
} local_job;

typedef struct local_thread {
    local_job *job;
    pthread_t thread;
    int rank;
} local_thread;

/* Keeps the first failure, then wakes the peers. */
static tagc_status finish_local(tagc_rank *rank, tagc_status status) {
    local_job *job = rank->job;
    pthread_mutex_lock(&job->lock);
    int is_first = job->first_failure == TAGC_OK;
    if (is_first) {
        job->first_failure = status;
        snprintf(job->first_text, sizeof job->first_text, "%s", tagc_last_error());
    }
    pthread_mutex_unlock(&job->lock);
    if (rank->comm && status != TAGC_ERR_INTERRUPTED) tagc_comm_abort(rank->comm, job->first_text);
    return status;
}

static void *local_main(void *arg) {
    local_thread *self = arg;
    local_job *job = self->job;
    tagc_rank rank = {.rank = self->rank, .world_size = job->n_ranks, .job = job};
    tagc_comm_options options;
    if (prepare_rank(job->launch, &rank, &options) != TAGC_OK ||
        tagc_comm_create_local(job->group, rank.rank, &options, &rank.comm) != TAGC_OK) {
        /* Other ranks would wait for this one until their time-out. Nothing has been written yet, so exiting is safe. */
        tagc_ranks_complain(0, tagc_last_error());
        _Exit(TAGC_EXIT_FAILURE);
    }
    job->run(&rank, job->context); /* a failure is already in the job */
    close_rank(&rank);
    return NULL;
}

static int run_local(const tagc_launch *launch, tagc_rank_fn run, void *context) {
    int n_ranks = launch->n_ranks > 0 ? launch->n_ranks : launch->n_local_ranks;
    if (n_ranks < 1) n_ranks = 1;
    if (prepare_products(launch, n_ranks, n_ranks) != TAGC_OK) {
        tagc_ranks_complain(0, tagc_last_error());
        return TAGC_EXIT_FAILURE;
    }
    local_job job = {.launch = launch, .n_ranks = n_ranks, .run = run, .context = context};
    local_thread *threads = calloc((size_t)n_ranks, sizeof *threads);
    if (!threads || tagc_local_group_create(n_ranks, &job.group) != TAGC_OK) {
        tagc_ranks_complain(0, threads ? tagc_last_error() : "out of memory for the ranks");
        free(threads);
        return TAGC_EXIT_FAILURE;
    }
    pthread_mutex_init(&job.lock, NULL);
    int n_started = 0;
    for (; n_started < n_ranks; n_started++) {
        threads[n_started] = (local_thread){.job = &job, .rank = n_started};
        if (tagc_thread_start(&threads[n_started].thread, "a rank", local_main, &threads[n_started]) !=
            TAGC_OK)
            break;
    }
    if (n_started < n_ranks) {
        /* Other ranks wait for ranks that will never start. Nothing has been written yet, so exiting is safe. */
        fprintf(stderr, "tagc: --ranks is %d, and this system gives no thread for rank %d\n", n_ranks,
                n_started);
        _Exit(TAGC_EXIT_FAILURE);
    }
    for (int i = 0; i < n_ranks; i++) pthread_join(threads[i].thread, NULL);
    if (job.first_failure != TAGC_OK) tagc_ranks_complain(0, job.first_text);
    int code = exit_code(job.first_failure);
    pthread_mutex_destroy(&job.lock);
    tagc_local_group_destroy(job.group);
    free(threads);
    return code;
}

/* ---- ranks as processes ---- */

void tagc_ranks_mpirun(int n_ranks, char text[TAGC_MPIRUN_BYTES]) {
    int is_root = 0, is_crowded = 0;
#if defined(OPEN_MPI) /* which refuses both */
    is_root = geteuid() == 0;
    is_crowded = n_ranks > sysconf(_SC_NPROCESSORS_ONLN);
#endif
    snprintf(text, TAGC_MPIRUN_BYTES, "mpirun%s%s -n %d", is_root ? " --allow-run-as-root" : "",
             is_crowded ? " --oversubscribe" : "", n_ranks);
}

#if TAGC_HAVE_MPI
/* Prints the failure and ends the job. Returns only after an interruption or a failure that all ranks have. */
static tagc_status finish_mpi(tagc_rank *rank, tagc_status status) {
    char text[TAGC_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "%s", tagc_last_error());
    if (status == TAGC_ERR_INTERRUPTED || rank->is_failure_common) {
        if (rank->rank == 0) tagc_ranks_complain(0, text);
        return status;
    }
    tagc_ranks_complain(rank->rank, text);
    if (rank->comm) tagc_comm_abort(rank->comm, "");
    MPI_Abort(MPI_COMM_WORLD, TAGC_EXIT_FAILURE);
    return status;
}

/* Called while MPI is not running, so that the process can exit without MPI_Abort's banner. */
static int refuse_ranks(int rank, int n_asked, int n_started, int is_launched) {
    char text[160], mpirun[TAGC_MPIRUN_BYTES];
    tagc_ranks_mpirun(n_asked, mpirun);
    if (is_launched)
        snprintf(text, sizeof text, "--ranks is %d, allowed under mpirun: nothing, or %d as it started",
                 n_asked, n_started);
    else
        snprintf(text, sizeof text, "--ranks is %d, but this process is alone: start it with %s", n_asked,
                 mpirun);
    tagc_ranks_complain(rank, text);
    return TAGC_EXIT_USAGE;
}

static int ranks_of_host(void) {
    MPI_Comm host;
    int n = 1;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &n);
    MPI_Comm_free(&host);
    return n;
}

/* Each comm calls MPI from a thread of its own. */
static tagc_status split_mpi(tagc_comm *comm, const tagc_split_group *group, const tagc_comm_options *options,
                             tagc_comm **out) {
    int level = MPI_THREAD_SINGLE;
    MPI_Comm part;
    (void)comm;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "two levels need an MPI that offers MPI_THREAD_MULTIPLE");
    if (MPI_Comm_split(MPI_COMM_WORLD, group->color, group->index, &part) != MPI_SUCCESS)
        return tagc_fail(TAGC_ERR_TRANSPORT, "MPI_Comm_split failed");
    tagc_status status = tagc_comm_create_mpi(part, options, out);
    MPI_Comm_free(&part);
    return status;
}

static int run_mpi(const tagc_launch *launch, tagc_rank_fn run, void *context) {
    int level = MPI_THREAD_SINGLE, mpi_rank = 0, mpi_size = 0;
    int asked = launch->has_levels ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED;
    int n_started = launcher_number(size_names, 0);
    if (launch->n_ranks > 0 && n_started > 0 && launch->n_ranks != n_started)
        return refuse_ranks(tagc_ranks_launcher_rank(), launch->n_ranks, n_started, 1);
    tagc_mpi_prepare();
    if (MPI_Init_thread(NULL, NULL, asked, &level) != MPI_SUCCESS) {
        tagc_ranks_complain(0, "MPI did not start");
        return TAGC_EXIT_FAILURE;
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &mpi_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &mpi_size);
    tagc_rank rank = {.rank = mpi_rank, .world_size = mpi_size};
    tagc_comm_options options;
    tagc_status status = TAGC_OK;
    if (launch->n_ranks > 1 && mpi_size == 1 && n_started == 0) {
        MPI_Finalize();
        return refuse_ranks(0, launch->n_ranks, 1, 0);
    }
    if (level < MPI_THREAD_SERIALIZED)
        status = tagc_fail(TAGC_ERR_UNSUPPORTED, "this MPI does not offer MPI_THREAD_SERIALIZED");
    else if (n_started > 0 && n_started != mpi_size)
        status = tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "the launcher started %d processes, but MPI sees %d: mpirun and the MPI that tagc was built"
            " with are not the same",
            n_started, mpi_size);
    else if (launch->n_ranks > 0 && launch->n_ranks != mpi_size)
        status =
            tagc_fail(TAGC_ERR_ARGUMENT, "--ranks is %d, allowed under mpirun: nothing, or %d as it started",
                      launch->n_ranks, mpi_size);
    if (status == TAGC_OK) status = prepare_products(launch, 1, ranks_of_host());
    if (status == TAGC_OK) status = prepare_rank(launch, &rank, &options);
    if (status == TAGC_OK) status = tagc_comm_create_mpi(MPI_COMM_WORLD, &options, &rank.comm);
    if (status == TAGC_OK) tagc_comm_set_split(rank.comm, split_mpi);
    status = status == TAGC_OK ? run(&rank, context) : tagc_rank_finish(&rank, status);
    close_rank(&rank);
    MPI_Finalize();
    return exit_code(status);
}
#else
static tagc_status finish_mpi(tagc_rank *rank, tagc_status status) {
    (void)rank;
    return status;
}

static int run_mpi(const tagc_launch *launch, tagc_rank_fn run, void *context) {
    (void)launch, (void)run, (void)context;
    tagc_ranks_complain(
        tagc_ranks_launcher_rank(),
        "this tagc was built without MPI; install libopenmpi-dev (or another MPI), then build again"
        " with cmake -DTAGC_MPI=ON, or use --ranks N without mpirun");
    return TAGC_EXIT_FAILURE;
}
#endif

tagc_status tagc_rank_finish(tagc_rank *rank, tagc_status status) {
    if (status == TAGC_OK) return status;
    return rank->job ? finish_local(rank, status) : finish_mpi(rank, status);
}

int tagc_ranks_is_local(int transport) {
    int is_launched = launcher_number(size_names, 0) > 0;
    return transport == TAGC_LAUNCH_LOCAL || (transport == TAGC_LAUNCH_AUTO && !is_launched);
}

int tagc_ranks_run(const tagc_launch *launch, tagc_rank_fn run, void *context) {
    if (!tagc_ranks_is_local(launch->transport)) return run_mpi(launch, run, context);
    if (launcher_number(size_names, 1) > 1) {
        tagc_ranks_complain(tagc_ranks_launcher_rank(),
                            "--transport local under mpirun would make separate runs of one"
                            " job; leave mpirun or --transport out");
        return TAGC_EXIT_USAGE;
    }
    return run_local(launch, run, context);
}
