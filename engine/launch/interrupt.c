/* A signal handler may only set a flag. The training loop reads it between steps. */
#include "launch/interrupt.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

/* Global, because a signal is sent to the process. */
static atomic_int asked;

static void on_signal(int number) {
    if (atomic_fetch_add(&asked, 1) > 0 && number != SIGUSR1) _exit(130);
}

void tagc_interrupt_watch(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    if (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN) /* by nohup */
        sigaction(SIGHUP, &action, NULL);
    signal(SIGPIPE, SIG_IGN); /* a run goes on when nobody reads its progress any more */
}

int tagc_interrupt_asked(void) {
    return atomic_load(&asked) > 0;
}
