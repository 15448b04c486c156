/* Ctrl-C and similar signals: the first asks the run to end, the second ends it at once. */
#ifndef TAGC_LAUNCH_INTERRUPT_H
#define TAGC_LAUNCH_INTERRUPT_H

/* From now on SIGINT, SIGTERM and SIGUSR1 (used by batch systems; mpirun passes it on) set the flag. */
void tagc_interrupt_watch(void);
int tagc_interrupt_asked(void);

#endif
