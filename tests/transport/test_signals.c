/* Which signals the threads of a comm and of a pool take, as a child process with handlers sees it: what a thread raises itself
 * reaches the handler, and what is sent to the process does not. */
#include "../test.h"
#include "core/pool.h"
#include "transport/comm.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { N_RAISED = 7, N_SENT = 6, FAULT_SEEN = 7 };

static const int raised[N_RAISED] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
static const int sent[N_SENT] = {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1, SIGPROF};
static volatile sig_atomic_t n_handled, is_at_fault;

static void on_signal(int number) {
    (void)number;
    if (is_at_fault) _exit(FAULT_SEEN);
    n_handled++;
}

static void handle_all(const int *numbers, int n) {
    struct sigaction action = {.sa_handler = on_signal};
    for (int i = 0; i < n; i++) sigaction(numbers[i], &action, NULL);
}

/* Ends the process: with FAULT_SEEN if the handler saw all, and the fault in the end. */
static void raise_all_and_fault(void) {
    handle_all(raised, N_RAISED);
    for (int i = 0; i < N_RAISED; i++) raise(raised[i]);
    if (n_handled != N_RAISED) _exit(1);
    is_at_fault = 1;
    *(volatile int *)(uintptr_t)8 = 1;
}

static void on_event(void *context, const tagc_event *event) {
    (void)context;
    if (strcmp(event->stream, "comm") == 0) raise_all_and_fault();
}

static void crash_in_comm(void) {
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.trace = on_event; /* on the comm thread */
    tagc_local_group *group;
    tagc_comm *comm;
    if (tagc_local_group_create(1, &group) != TAGC_OK ||
        tagc_comm_create_local(group, 0, &options, &comm) != TAGC_OK)
        _exit(2);
    (void)tagc_comm_barrier(comm);
    _exit(3);
}

static tagc_status crash(void *arg) {
    (void)arg;
    raise_all_and_fault();
    return TAGC_OK;
}

static void crash_in_worker(void) {
    tagc_local_group *group;
    tagc_comm *comm;
    tagc_task task = {.run = crash};
    if (tagc_local_group_create(1, &group) != TAGC_OK ||
        tagc_comm_create_local(group, 0, NULL, &comm) != TAGC_OK)
        _exit(2);
    tagc_comm_submit(comm, &task);
    (void)tagc_comm_join(comm, &task);
    _exit(3);
}

static void crash_at_1(void *arg, int index, int n_threads) {
    (void)arg, (void)n_threads;
    if (index == 1) raise_all_and_fault();
}

static void crash_in_pool(void) {
    tagc_pool *pool;
    if (tagc_pool_create(2, &pool) != TAGC_OK) _exit(2);
    tagc_pool_run(pool, crash_at_1, NULL);
    _exit(3);
}

/* The calling thread blocks what is sent, so that any other thread that can would take it. */
static void send_all(void) {
    tagc_local_group *group;
    tagc_comm *comm;
    tagc_pool *pool;
    handle_all(sent, N_SENT);
    if (tagc_local_group_create(1, &group) != TAGC_OK ||
        tagc_comm_create_local(group, 0, NULL, &comm) != TAGC_OK || tagc_pool_create(4, &pool) != TAGC_OK)
        _exit(2);
    sigset_t all, pending;
    sigemptyset(&all);
    for (int i = 0; i < N_SENT; i++) sigaddset(&all, sent[i]);
    sigprocmask(SIG_BLOCK, &all, NULL);
    for (int i = 0; i < N_SENT; i++) kill(getpid(), sent[i]);
    nanosleep(&(const struct timespec){.tv_nsec = 100000000}, NULL);
    sigpending(&pending);
    for (int i = 0; i < N_SENT; i++)
        if (!sigismember(&pending, sent[i])) _exit(10 + i);
    _exit(n_handled ? 1 : 0);
}

static int run_child(void (*body)(void)) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        body();
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(what_a_thread_raises_reaches_the_handler) {
    assert_int_equal(run_child(crash_in_comm), FAULT_SEEN);
    assert_int_equal(run_child(crash_in_worker), FAULT_SEEN);
    assert_int_equal(run_child(crash_in_pool), FAULT_SEEN);
}

TEST(what_the_process_is_sent_waits_for_its_own_thread) {
    assert_int_equal(run_child(send_all), 0);
}
