/* How tagc starts threads. */
#ifndef TAGC_CORE_THREAD_H
#define TAGC_CORE_THREAD_H

#include "core/status.h"

#include <pthread.h>

/* TAGC_ERR_MEMORY if the system gives no thread. what: for the text, such as "the comm thread". */
tagc_status tagc_thread_start(pthread_t *thread, const char *what, void *(*main)(void *), void *arg);

#endif
