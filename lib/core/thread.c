/* A thread of tagc's leaves the program's signals (SIGINT, SIGCHLD, SIGALRM, ...) to the program's own threads. Signals that a thread
 * raises by what it does itself stay open: a crash reporter hears of a crash here as of one elsewhere. */
#include "core/thread.h"

#include <signal.h>
#include <string.h>

static const int own_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};

tagc_status tagc_thread_start(pthread_t *thread, const char *what, void *(*main)(void *), void *arg) {
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own_signals / sizeof *own_signals; i++) sigdelset(&blocked, own_signals[i]);
    pthread_sigmask(SIG_SETMASK, &blocked,
                    &before); /* a thread begins with the mask of the one that makes it */
    int error = pthread_create(thread, NULL, main, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? tagc_fail(TAGC_ERR_MEMORY, "%s cannot be started: %s", what, strerror(error)) : TAGC_OK;
}
