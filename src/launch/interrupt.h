/* Ctrl-C and its relatives: the first asks, the second ends at once. */
#ifndef TAGC_LAUNCH_INTERRUPT_H
#define TAGC_LAUNCH_INTERRUPT_H

/* From now on SIGINT, SIGTERM and SIGUSR1 (batch systems, mpirun passes it on) raise the flag. */
void tagc_interrupt_watch(void);
int tagc_interrupt_asked(void);

#endif
