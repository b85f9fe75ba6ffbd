/* The fast path of plain eager calls, in C: shared declarations.

   A call that is like an earlier one repeats its launches on its own tensors (docs/architecture.md). torch is
   reached through Python, through DLPack's table of C functions and through a few functions that libtorch exports,
   so no header of torch is needed. All functions are called with the GIL held unless they say otherwise. */

#ifndef ONEPASS_NATIVE_H
#define ONEPASS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <stdint.h>

enum {
    MAX_TENSORS = 32,     /* tensor arguments and outputs of an op */
    MAX_SOURCES = 4,      /* further memory that a call takes */
    MAX_KEY = 512,        /* 64-bit words of a key */
    MAX_WORDS = 256,      /* 64-bit words of a launch's arguments */
    MAX_LAUNCHES = 16,    /* launches of a call */
    MAX_ENTRIES = 4096,   /* calls that a table remembers */
};

/* --- DLPack 1: the parts of its binary interface that are used ------------------------------------------------- */

enum { DL_CPU = 1, DL_CUDA = 2 };

typedef struct {
    uint32_t major, minor;
} DLVersion;

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLView;

typedef struct {
    DLVersion version;
    void *previous;
    void *allocate;
    void *managed_from_object;
    void *managed_to_object;
    int (*view)(void *object, DLView *out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} DLExchange;

/* --- what is known of torch ------------------------------------------------------------------------------------ */

typedef struct {
    const DLExchange *api;
    PyTypeObject *tensor, *parameter, *dtype;
    PyObject *dispatch_modes, *function_modes;  /* functions: the number of active modes */
    PyObject *transforms, *tracing;             /* functions: None if there is none */
    PyObject *dual, *dual_level;                /* forward AD: the dictionary and the name of the current level */
    PyObject *grad_enabled, *inference_mode, *threads; /* functions */
    PyObject *is_neg, *is_inference, *bump_version; /* functions of a tensor */
    PyObject *environment, *debug_name, *debug_on;
    PyObject *profiler, *profiling;             /* the profiler's dictionary and the name of its switch */
    PyObject *event;                            /* a context manager, of a name and a list of tensors */
    PyObject *fail;                             /* raises for a CUDA error */
    PyObject *requires_grad;                    /* the name */
} Torch;

extern Torch torch_;

/* libtorch's own functions of a `const at::Tensor &`, which is the address of a pointer. Python's tensors hold that
   pointer `place` bytes after their start. Without them (NULL) Python's functions are called, for 70 ns each. */
typedef struct {
    size_t place;
    _Bool (*is_neg)(const void *tensor);
    _Bool (*is_inference)(const void *tensor);
    void (*bump_version)(const void *tensor);
} Direct;

extern Direct direct;
extern int forked;
/* Whether this thread is recording a call. */
extern _Thread_local int recording;

/* --- keys ------------------------------------------------------------------------------------------------------ */

enum { IS_LIST = 1, IS_WRITTEN = 2 };

/* The positional arguments of an op: tensors (and lists of them), options, outputs. */
typedef struct {
    int inputs, options, outputs;
    int reads_values; /* in debug mode the values of its tensors are read */
    uint8_t flags[MAX_TENSORS]; /* of inputs, then outputs */
} Form;

typedef struct {
    PyObject *object;  /* borrowed; NULL: None */
    uintptr_t start, end; /* equal if it has no elements */
} Seen;

typedef struct {
    int count, on_cpu, in_inference_mode;
    uint32_t versioned; /* positions of written tensors that have a version, as bits */
    uint64_t hash;
    uint64_t words[MAX_KEY];
    Seen seen[MAX_TENSORS];
} Key;

/* 1, 0, or -1 with an error. */
int is_negated(PyObject *tensor);
int is_inference(PyObject *tensor);
int requires_grad(PyObject *tensor);
int in_inference_mode(void);
/* Note that a tensor was written, for autograd. -1 with an error. */
int bump_version(PyObject *tensor);

/* Whether nothing intercepts the call: no mode, transform, tracer or dual level. Compilers are tested in Python. */
int is_plain(void);
int debugging(void);
int grad_mode(void);

int profiling(void);
/* An event that has begun, of a call with this key; NULL with an error. */
PyObject *begin_event(const Form *form, const Key *key, PyObject *name);
/* Keeps the call's error, if there is one. */
void end_event(PyObject *event);

/* 1: the key is complete; 0: such a call is not for the fast path; -1: a Python error. */
int make_key(const Form *form, PyObject *const *args, int grad, Key *key);

/* --- plans ----------------------------------------------------------------------------------------------------- */

typedef struct Plan Plan;

/* A plan from its description in Python; NULL with an error. Positions are those of inputs, then outputs. */
Plan *plan_from(PyObject *description, const Form *form);
void plan_free(Plan *plan);
/* Make the call. NULL without an error: not possible in this thread or process. */
PyObject *plan_run(Plan *plan, const Form *form, const Key *key);
/* Let no plan use memory that it has kept for a stream. */
void forget_kept(void);
int fail_limit(const char *what);
/* Set CUDA's functions. */
void set_driver(void *launch, void *get_device, void *is_capturing);
int init_scratch(void);

#endif
