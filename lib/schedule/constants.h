/* The numbers of the schedule. include/tagc/schedule.h says what each rule is for; lab/docs/schedule.md what it is worth.
 * A study that leaves a rule out compiles with another number: cmake -DCMAKE_C_FLAGS=-DTAGC_ALARM=1e9. */
#ifndef TAGC_SCHEDULE_CONSTANTS_H
#define TAGC_SCHEDULE_CONSTANTS_H

#define TAGC_WINDOW 20  /* exchanges */
#define TAGC_FAINT 0.03 /* times the root mean square of the samples: smaller elements do not count */

#define TAGC_LARGEST_SHARE 0.08 /* of values, sent at LARGEST */
#define TAGC_BLOCK_OF_EVERY                                                                                  \
    32 /* values to a scale where all are sent in INT4; among more, small ones arrive late and in bursts */

#ifndef TAGC_FRESH_WINDOWS
#define TAGC_FRESH_WINDOWS 3 /* at FRESH */
#endif
#ifndef TAGC_MOST_COHERENCE
#define TAGC_MOST_COHERENCE 1.3 /* of noise */
#endif
#ifndef TAGC_WEAK_COHERENCE
#define TAGC_WEAK_COHERENCE 2.2 /* of a weak direction, which may follow the others to LARGEST; 0: none may */
#endif
#ifndef TAGC_ALARM
#define TAGC_ALARM 2.6 /* coherence at which a parameter begins anew */
#endif
#ifndef TAGC_MOST_GROWTH
#define TAGC_MOST_GROWTH 20.0 /* norm of a residual in gradients' norms */
#endif
#ifndef TAGC_FADING
#define TAGC_FADING                                                                                          \
    10 /* windows in which a first moment becomes short, in a model with random weights; 1: at once */
#endif
#ifndef TAGC_FADING_OF_TRAINED
#define TAGC_FADING_OF_TRAINED 2 /* the same in every other model; divides TAGC_FADING */
#endif
#define TAGC_MOST_DOUBLINGS 6 /* of the windows of noise that a parameter waits for */

#ifndef TAGC_SELDOM
#define TAGC_SELDOM 10.0 /* times the memory of the second moment where values are selected; 1: the user's */
#endif

#ifndef TAGC_MOST_SHARE
#define TAGC_MOST_SHARE 4.0 /* of a parameter, in its level's share; 1: all have the same */
#endif
#define TAGC_LEAST_SHARE 0.125
#define TAGC_SHARE_CHANGE 0.2 /* shares follow where one has changed by more */

#define TAGC_LEAST_LOSSES 20 /* in a window, of all ranks */
#ifndef TAGC_MOST_RISE
#define TAGC_MOST_RISE 0.02 /* of a window's mean loss above the lowest, in the lowest */
#endif
#define TAGC_MOST_ERRORS 4.0 /* and in standard errors of the difference */

#endif
