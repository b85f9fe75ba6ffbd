/* Launches: of a kernel on a CPU, which may use scratch memory of the thread, or by CUDA's driver. */

#ifndef ONEPASS_LAUNCH_H
#define ONEPASS_LAUNCH_H

#include "native.h"

typedef struct {
    int word, base; /* bases: tensors by position, then sources, then scratch memory */
    int64_t offset;
} Patch;

typedef struct {
    int cuda, words, patches;
    /* CPU */
    void (*serial)(void *);
    void (*prepare)(void *);
    void (*parallel)(void *);
    void (*team)(void (*)(void *), void *, unsigned int, unsigned int);
    unsigned int threads;
    size_t scratch;
    /* CUDA */
    void *function;
    unsigned int grid, block, shared;
    int pdl, device;
    uint64_t *template;
    Patch *patch;
} Launch;

/* From its description in Python; -1 with an error. */
int parse_launch(PyObject *description, Launch *launch, int bases);
void free_launch(Launch *launch);

/* Without the GIL, if the plan releases it. */
void run_cpu(const Launch *launch, const uintptr_t *bases);
/* Without the GIL: CUDA waits while a queue is full. CUDA's error, or 0. */
int run_cuda(const Launch *launch, const uintptr_t *bases, void *stream);
/* The current device, or -1 in a thread without a context. */
int cuda_device(void);
/* Whether launches on a stream are captured: 1 also if CUDA does not tell. */
int cuda_captures(void *stream);

/* Cache lines for this many bytes, or NULL. */
void *scratch_of(size_t size);

#endif
