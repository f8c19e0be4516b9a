/* To be preloaded: simulates a kernel that cannot wipe memory on fork, such as gVisor's. */
#include <errno.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

int madvise(void *start, size_t length, int advice) {
    enum { MADV_WIPEONFORK = 18 };
    if (advice == MADV_WIPEONFORK) {
        errno = EINVAL;
        return -1;
    }
    return syscall(SYS_madvise, start, length, advice);
}
