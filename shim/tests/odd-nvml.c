// A scripted NVML: two GPUs, processes of this container and of others, samples of any percentage. Tests steer it
// through the file named by ODD_NVML: lines `process PID BYTES PERCENT`. With ODD_NVML_COARSE it does not report
// utilization by process, as with MIG and vGPU, and no process's name. ODD_NVML_WORDS is the size of its private table.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, MISMATCH = 25 };
typedef unsigned u32;
typedef uint64_t u64;
static char devices[2];

static struct { u32 pid, percent; u64 bytes; } all[64];
static int read_all(void) {
    FILE *file = fopen(getenv("ODD_NVML"), "r");
    int n = 0;
    while (file && n < 64 && fscanf(file, " process %u %lu %u", &all[n].pid, &all[n].bytes, &all[n].percent) == 3) n++;
    if (file) fclose(file);
    return n;
}
static int known(char *device) { return device == devices || device == devices + 1; }

int nvmlInit_v2(void) { return OK; }
int nvmlInit(void) { return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { *count = 2; return OK; }
static int by_number(u32 n, char **device) { if (n > 1) return INVALID; *device = devices + n; return OK; }
int nvmlDeviceGetHandleByIndex(u32 n, char **device) { return by_number(n, device); }
int nvmlDeviceGetHandleByIndex_v2(u32 n, char **device) { return by_number(n, device); }
// Serial numbers, UUIDs and bus ids end in the GPU's number.
static int by_text(const char *text, char **device) { return by_number(text[strlen(text) - 1] - '0', device); }
int nvmlDeviceGetHandleByUUID(const char *text, char **device) { return by_text(text, device); }
int nvmlDeviceGetHandleBySerial(const char *text, char **device) { return by_text(text, device); }
int nvmlDeviceGetHandleByPciBusId(const char *text, char **device) { return by_text(text, device); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, char **device) { return by_text(text, device); }
int nvmlDeviceGetUUID(char *device, char *text, u32 room) {
    if (!known(device)) return INVALID;
    snprintf(text, room, "GPU-11111111-1111-1111-1111-1111111111%02x", (u32)(device - devices));
    return OK;
}
int nvmlDeviceGetMemoryInfo(char *device, u64 *m) { if (!known(device)) return INVALID; m[0] = 80ull << 30; m[1] = 70ull << 30; m[2] = 10ull << 30; return OK; }
int nvmlDeviceGetBAR1MemoryInfo(char *device, u64 *m) { if (!known(device)) return INVALID; m[0] = 128ull << 30; m[1] = 120ull << 30; m[2] = 8ull << 30; return OK; }

int nvmlDeviceGetConfComputeProtectedMemoryUsage(char *device, u64 *m) { return nvmlDeviceGetMemoryInfo(device, m); }

struct v1 { u32 pid; u64 bytes; };
struct v2 { u32 pid; u64 bytes; u32 gi, ci; };
struct v2p { u32 pid; u64 bytes; u32 gi, ci; u64 protected; };
#define LIST(name, type) \
    int name(char *device, u32 *count, struct type *to) { \
        if (!known(device) || !count) return INVALID; \
        int n = read_all(); u32 room = *count; *count = n; \
        if (n && (!to || (u32)n > room)) return SMALL; \
        for (int i = 0; i < n; i++) { to[i].pid = all[i].pid; to[i].bytes = all[i].bytes; } \
        return OK; \
    }
LIST(nvmlDeviceGetComputeRunningProcesses, v1)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, v2)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, v2)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, v2)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, v2)
struct details { u32 version, mode, count; struct v2p *to; };
LIST(details_of, v2p)
int nvmlDeviceGetRunningProcessDetailList(char *device, struct details *d) {
    if (d->version != (sizeof *d | 1 << 24)) return MISMATCH;
    return details_of(device, &d->count, d->to);
}

struct sample { u32 pid; u64 at; u32 sm, memory, encoder, decoder; };
int nvmlDeviceGetProcessUtilization(char *device, struct sample *to, u32 *count, u64 since) {
    if (!known(device) || !count) return INVALID;
    if (getenv("ODD_NVML_COARSE")) return NOT_SUPPORTED;
    int n = read_all(); u32 room = *count; *count = n;
    if (!n) return NOT_FOUND;
    if (!to || (u32)n > room) return SMALL;
    for (int i = 0; i < n; i++) to[i] = (struct sample){ all[i].pid, since + 1, all[i].percent, all[i].percent / 2, 3, 4 };
    return OK;
}
struct info { u64 at; u32 pid, sm, memory, encoder, decoder, jpeg, flow; };
struct infos { u32 version, count; u64 since; struct info *to; };
int nvmlDeviceGetProcessesUtilizationInfo(char *device, struct infos *d) {
    if (d->version != (sizeof *d | 1 << 24)) return MISMATCH;
    int n = read_all(); u32 room = d->count; d->count = n;
    if (!n) return NOT_FOUND;
    if (!d->to || (u32)n > room) return SMALL;
    for (int i = 0; i < n; i++) d->to[i] = (struct info){ d->since + 1, all[i].pid, all[i].percent, 1, 2, 3, 4, 5 };
    return OK;
}
struct support { u32 version, is_supported; };
int nvmlGpmQueryDeviceSupport(char *device, struct support *to) { if (!known(device)) return INVALID; to->is_supported = 1; return OK; }
int nvmlGpmSampleGet(char *device, void *sample) { return known(device) ? OK : INVALID; }
int nvmlGpmMigSampleGet(char *device, u32 instance, void *sample) { return known(device) ? OK : INVALID; }
int nvmlDeviceGetUtilizationRates(char *device, u32 *rates) { if (!known(device)) return INVALID; rates[0] = 97; rates[1] = 96; return OK; }
struct states { u32 flags; struct { u32 present, percent, more, less; } domains[8]; };
int nvmlDeviceGetDynamicPstatesInfo(char *device, struct states *s) {
    if (!known(device)) return INVALID;
    memset(s, 0, sizeof *s);
    for (int i = 0; i < 3; i++) { s->domains[i].present = 1; s->domains[i].percent = 97 - i; }
    return OK;
}
struct value { u64 at, value; };
int nvmlDeviceGetSamples(char *device, int what, u64 since, int *kind, u32 *count, struct value *to) {
    if (!known(device)) return INVALID;
    *kind = 1;
    if (!to) { *count = 2; return OK; }
    for (u32 i = 0; i < *count; i++) to[i] = (struct value){ since + i, 97 };
    return OK;
}
int nvmlDeviceGetAccountingPids(char *device, u32 *count, u32 *pids) {
    int n = read_all(); u32 room = *count; *count = n;
    if (n && (!pids || (u32)n > room)) return SMALL;
    for (int i = 0; i < n; i++) pids[i] = all[i].pid;
    return OK;
}
struct stats { u32 gpu, memory; u64 most, time, start; u32 running, reserved[5]; };
int nvmlDeviceGetAccountingStats(char *device, u32 pid, struct stats *to) { memset(to, 0, sizeof *to); to->gpu = 42; return OK; }
struct stats2 { u32 pid, running, gpu, memory; };
int nvmlDeviceGetAccountingStats_v2(char *device, struct stats2 *to) { to->gpu = 42; return OK; }
int nvmlSystemGetProcessName(u32 pid, char *name, u32 room) {
    if (getenv("ODD_NVML_COARSE")) return NOT_FOUND;
    snprintf(name, room, "process %u", pid);
    return OK;
}

struct named { struct v2p process; char name[4096]; };
static int private_list(char *device, u32 *count, struct named *to) {
    if (!known(device) || !count) return INVALID;
    int n = read_all(); *count = n;
    for (int i = 0; i < n; i++) { to[i].process = (struct v2p){ all[i].pid, all[i].bytes }; snprintf(to[i].name, 4096, "theirs"); }
    return OK;
}
static int seven(void) { return 7; }
int nvmlInternalGetExportTable(u64 **to, const char *name) {
    static u64 tables[2][251];
    int which = memcmp(name, "\xc4\xfe\x3e\x6c\xc9\x8f\x6c\x4e\xa3\x27\xee\x69\x6e\x12\xf7\xc4", 16) != 0;
    const char *words = getenv("ODD_NVML_WORDS");
    for (int i = 1; i < 251; i++) tables[which][i] = (u64)(i >= 213 && i <= 215 ? (void *)private_list : (void *)seven);
    tables[which][0] = (words ? atoi(words) : 251) * sizeof(u64);
    *to = tables[which];
    return OK;
}
