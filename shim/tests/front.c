// A libcuda.so.1 in front of the shim: forwards a program's look-ups, and records the results and the driver's own
// results in the file named by LOOKUPS. Only for libcudart, which finds nearly all of its functions in this way.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuGetProcAddress(const char *name, void **to, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, int *status);

typedef int (*ask)(const char *, void **, int, uint64_t, int *);


static void *shim(void) { return dlopen("/usr/lib/tranche/libcuda.so.1", RTLD_NOW | RTLD_LOCAL); }
static void *driver(void) { return dlopen("/usr/lib/tranche/driver/libcuda.so.1", RTLD_NOW | RTLD_LOCAL); }

static int look_up(const char *form, const char *name, void **to, int version, uint64_t flags, int *status) {
    void *theirs = NULL;
    int their_status = -1, our_status = -1;
    Dl_info ours = {0}, real = {0};
    int their_code = ((ask)dlsym(driver(), form))(name, &theirs, version, flags, &their_status);
    int code = ((ask)dlsym(shim(), form))(name, to, version, flags, &our_status);
    if (status) *status = our_status;
    if (*to) dladdr(*to, &ours);
    if (theirs) dladdr(theirs, &real);
    FILE *log = fopen(getenv("LOOKUPS"), "a");
    fprintf(log, "%s %s %d %d %d %d %d %d %s %s %s %s\n", form, *name ? name : "-", version, (int)flags, code, their_code,
        our_status, their_status, *to == theirs ? "same" : "other", ours.dli_fname ? ours.dli_fname : "-",
        ours.dli_sname ? ours.dli_sname : "-", real.dli_sname ? real.dli_sname : "-");
    fclose(log);
    // A program that looks up this function itself continues to use this one.
    if (ours.dli_sname && !strcmp(ours.dli_sname, "cuGetProcAddress")) *to = (void *)cuGetProcAddress;
    if (ours.dli_sname && !strcmp(ours.dli_sname, "cuGetProcAddress_v2")) *to = (void *)cuGetProcAddress_v2;
    return code;
}
int cuGetProcAddress(const char *name, void **to, int version, uint64_t flags) { return look_up("cuGetProcAddress", name, to, version, flags, NULL); }
int cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, int *status) { return look_up("cuGetProcAddress_v2", name, to, version, flags, status); }
// CUDA 13.5 asks for this by name.
int cuDriverGetVersion(int *version) { return ((int (*)(int *))dlsym(shim(), "cuDriverGetVersion"))(version); }
