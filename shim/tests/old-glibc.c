// A program that starts on any glibc: it has no start files, which need the __libc_start_main of the glibc at build time.
// It is linked against the driver only, and prints the driver's version and the result of cuInit.
#include <stdio.h>
#include <stdlib.h>
extern int cuInit(unsigned), cuDriverGetVersion(int *), cuGetErrorName(int, const char **);
__attribute__((force_align_arg_pointer)) void _start(void) {
    int version = 0;
    const char *name = "";
    int asked = cuDriverGetVersion(&version);
    cuGetErrorName(cuInit(0), &name);
    char line[200];
    int length = snprintf(line, sizeof line, "%d %d %s\n", asked, version, name);
    fwrite(line, 1, length, stdout);
    exit(0);
}
