// A musl program that opens the driver. Built without headers, because musl's are not installed.
extern void *dlopen(const char *, int), *dlsym(void *, const char *);
extern char *dlerror(void);
extern int printf(const char *, ...), puts(const char *);
int main(void) {
    void *driver = dlopen("/usr/lib/x86_64-linux-gnu/libcuda.so.1", 2);
    if (!driver) { puts(dlerror()); return 1; }
    int (*init)(unsigned) = dlsym(driver, "cuInit");
    printf("%d\n", init ? init(0) : -1);
    return 0;
}
