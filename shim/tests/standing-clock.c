/* A clock that stands, to be preloaded: what the shim does now and then, by the clock, it has then done before
 * anybody counts its instructions, and never does again, however slow the counter is on a machine. */
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    (void)clock;
    *now = (struct timespec){ .tv_sec = 1000 };
    return 0;
}
