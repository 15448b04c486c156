/* Ctrl-C and similar signals: the first asks the run to end, the second ends it at once. */
#ifndef TAGC_LAUNCH_INTERRUPT_H
#define TAGC_LAUNCH_INTERRUPT_H

/* From now on SIGINT, SIGTERM, SIGUSR1 (used by batch systems; mpirun passes it on) and SIGHUP (the terminal is gone; not
 * under nohup) set the flag, and SIGPIPE does nothing. */
void tagc_interrupt_watch(void);
int tagc_interrupt_asked(void);

#endif
