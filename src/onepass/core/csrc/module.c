/* The module: tables of remembered calls, one per op. */

#include "native.h"

#include <stdlib.h>
#include <string.h>

_Thread_local int recording;

/* The digest of the sources that this was compiled from (build.py): Python's side fits no other. */
#ifndef SOURCES_DIGEST
#define SOURCES_DIGEST ""
#endif

static int enabled = 1;

/* What `call` answers instead of results. */
enum { NOT_HERE = 0, FIRST = 1, RECORD = 2 };

typedef enum { MET_ONCE, REFUSED, PLANNED } State;

typedef struct Entry {
    struct Entry *next;
    uint64_t hash;
    State state;
    int users; /* the table, and calls that use it */
    int words;
    Plan *plan;
    uint64_t key[];
} Entry;

enum { BUCKETS = 4096 };

typedef struct {
    PyObject_HEAD
    Form form;
    Entry **buckets;
    int entries;
    unsigned long long hits, misses, refused;
    PyObject *answers[3];
    PyObject *name; /* of its events in a profile */
} Table;

static void release(Entry *entry)
{
    if (--entry->users)
        return;
    if (entry->plan != NULL)
        plan_free(entry->plan);
    free(entry);
}

static void clear(Table *table)
{
    for (int i = 0; i < BUCKETS; i++) {
        Entry *entry = table->buckets[i];
        table->buckets[i] = NULL;
        while (entry != NULL) {
            Entry *next = entry->next;
            release(entry);
            entry = next;
        }
    }
    table->entries = 0;
}

static Entry *find(Table *table, const Key *key)
{
    Entry *entry = table->buckets[key->hash % BUCKETS];
    for (; entry != NULL; entry = entry->next)
        if (entry->hash == key->hash && entry->words == key->count &&
            memcmp(entry->key, key->words, sizeof(uint64_t) * (size_t)key->count) == 0)
            return entry;
    return NULL;
}

static Entry *insert(Table *table, const Key *key)
{
    if (table->entries >= MAX_ENTRIES)
        clear(table);
    size_t size = sizeof(uint64_t) * (size_t)key->count;
    Entry *entry = calloc(1, sizeof(Entry) + size);
    if (entry == NULL)
        return NULL;
    entry->hash = key->hash;
    entry->state = MET_ONCE;
    entry->users = 1;
    entry->words = key->count;
    memcpy(entry->key, key->words, size);
    entry->next = table->buckets[key->hash % BUCKETS];
    table->buckets[key->hash % BUCKETS] = entry;
    table->entries++;
    return entry;
}

/* --- Table ----------------------------------------------------------------------------------------------------- */

static PyObject *answer(Table *table, int which)
{
    PyErr_Clear();
    Py_INCREF(table->answers[which]);
    return table->answers[which];
}

enum { FAILED = -1, SKIPPED = 0, KEYED = 1, UNFIT = 2 };

/* KEYED: the call may be looked up by this key. SKIPPED: no call may be now. UNFIT: this one may not. */
static int look(const Table *table, PyObject *const *args, Py_ssize_t count, Key *key)
{
    const Form *form = &table->form;
    if (!enabled || recording || count != form->inputs + form->options + form->outputs || !is_plain())
        return SKIPPED;
    if (form->reads_values && debugging())
        return SKIPPED;
    int made = make_key(form, args, grad_mode(), key);
    return made == 0 ? UNFIT : made;
}

/* The results of a planned call; NULL without an error if it cannot be made here. */
static PyObject *perform(Table *table, Entry *entry, const Key *key)
{
    PyObject *event = NULL;
    entry->users++; /* another thread may clear the table meanwhile */
    PyObject *results = NULL;
    if (!profiling() || (event = begin_event(&table->form, key, table->name)) != NULL)
        results = plan_run(entry->plan, &table->form, key);
    if (event != NULL)
        end_event(event);
    release(entry);
    table->hits += results != NULL;
    return results;
}

static PyObject *table_call(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Table *table = (Table *)self;
    Key key;
    int found = look(table, args, count, &key);
    if (found == FAILED)
        return NULL;
    if (found != KEYED) {
        table->refused += found == UNFIT;
        return answer(table, NOT_HERE);
    }
    Entry *entry = find(table, &key);
    if (entry != NULL && entry->state == PLANNED) {
        PyObject *results = perform(table, entry, &key);
        if (results != NULL || PyErr_Occurred() != NULL)
            return results;
        table->misses++;
        return answer(table, NOT_HERE);
    }
    table->misses++;
    if (entry == NULL)
        return answer(table, insert(table, &key) == NULL ? NOT_HERE : FIRST);
    return answer(table, entry->state == MET_ONCE ? RECORD : NOT_HERE);
}

/* Like call, but a call that is not planned is left as it is: None. */
static PyObject *table_repeat(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Table *table = (Table *)self;
    Key key;
    int found = look(table, args, count, &key);
    if (found == FAILED)
        return NULL;
    Entry *entry = found == KEYED ? find(table, &key) : NULL;
    PyObject *results = NULL;
    if (entry != NULL && entry->state == PLANNED) {
        results = perform(table, entry, &key);
        if (results == NULL && PyErr_Occurred() != NULL)
            return NULL;
    }
    if (results == NULL) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return results;
}

/* store(arguments, plan): remember the plan of the call with these arguments; None: that it cannot be repeated. */
static PyObject *table_store(PyObject *self, PyObject *args)
{
    Table *table = (Table *)self;
    const Form *form = &table->form;
    PyObject *arguments, *description;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &arguments, &description))
        return NULL;
    int count = form->inputs + form->options + form->outputs;
    PyObject *values[2 * MAX_TENSORS];
    if (PyTuple_Size(arguments) != count || count > 2 * MAX_TENSORS) {
        PyErr_Format(PyExc_ValueError, "expected %d arguments", count);
        return NULL;
    }
    for (int i = 0; i < count; i++)
        values[i] = PyTuple_GetItem(arguments, i);
    Key key;
    int made = make_key(form, values, 0, &key);
    if (made < 0)
        return NULL;
    Plan *plan = NULL;
    if (made && description != Py_None) {
        plan = plan_from(description, form);
        if (plan == NULL)
            return NULL;
    }
    Entry *entry = made ? find(table, &key) : NULL;
    if (made && entry == NULL)
        entry = insert(table, &key);
    if (entry == NULL || entry->state == PLANNED) { /* another thread has stored the same */
        if (plan != NULL)
            plan_free(plan);
        Py_RETURN_NONE;
    }
    entry->plan = plan;
    entry->state = plan == NULL ? REFUSED : PLANNED;
    Py_RETURN_NONE;
}

static PyObject *table_counts(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    Table *table = (Table *)self;
    return Py_BuildValue("{s:K,s:K,s:K,s:i}", "hits", table->hits, "misses", table->misses, "refused", table->refused,
                         "entries", table->entries);
}

static PyObject *table_clear(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    Table *table = (Table *)self;
    clear(table);
    table->hits = table->misses = table->refused = 0;
    Py_RETURN_NONE;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *options)
{
    (void)options;
    int inputs, count, outputs, reads_values;
    const char *flags;
    Py_ssize_t size;
    PyObject *name;
    if (!PyArg_ParseTuple(args, "iiipy#U", &inputs, &count, &outputs, &reads_values, &flags, &size, &name))
        return NULL;
    if (inputs < 1 || outputs < 0 || count < 0 || count > MAX_TENSORS || size != inputs + outputs || size > MAX_TENSORS) {
        PyErr_SetString(PyExc_ValueError, "the op has too many arguments for a table");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Table *table = (Table *)allocate(type, 0);
    if (table == NULL)
        return NULL;
    table->form.inputs = inputs;
    table->form.options = count;
    table->form.outputs = outputs;
    table->form.reads_values = reads_values;
    memcpy(table->form.flags, flags, (size_t)size);
    Py_INCREF(name);
    table->name = name;
    table->buckets = calloc(BUCKETS, sizeof(Entry *));
    for (int i = 0; i < 3; i++)
        table->answers[i] = PyLong_FromLong(i);
    if (table->buckets == NULL || table->answers[2] == NULL) {
        Py_DECREF((PyObject *)table);
        return PyErr_NoMemory();
    }
    return (PyObject *)table;
}

static void table_dealloc(PyObject *self)
{
    Table *table = (Table *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (table->buckets != NULL)
        clear(table);
    free(table->buckets);
    for (int i = 0; i < 3; i++)
        Py_XDECREF(table->answers[i]);
    Py_XDECREF(table->name);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(self);
    Py_DECREF((PyObject *)type);
}

static PyMethodDef table_methods[] = {
    {"call", (PyCFunction)(void (*)(void))table_call, METH_FASTCALL, "The results, or why there are none."},
    {"repeat", (PyCFunction)(void (*)(void))table_repeat, METH_FASTCALL, "The results of a known call, or None."},
    {"store", table_store, METH_VARARGS, "Remember how to repeat a call."},
    {"counts", table_counts, METH_NOARGS, "Hits, misses, refusals and entries."},
    {"clear", table_clear, METH_NOARGS, "Forget all calls."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, (void *)table_new},
    {Py_tp_dealloc, (void *)table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_doc, (void *)"The remembered calls of one op."},
    {0, NULL},
};

static PyType_Spec table_spec = {"onepass.core._native.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, table_slots};

/* --- module ---------------------------------------------------------------------------------------------------- */

/* set_up(capsule, types, functions, dual, environment, profiler) */
static PyObject *set_up(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    Torch t;
    memset(&t, 0, sizeof t);
    if (!PyArg_ParseTuple(args, "O(OOO)(OOOOOOOOOOO)(O!O)(O!OO)(O!OO)", &capsule, &t.tensor, &t.parameter, &t.dtype,
                          &t.dispatch_modes, &t.function_modes, &t.transforms, &t.tracing, &t.grad_enabled,
                          &t.inference_mode, &t.threads, &t.is_neg, &t.is_inference, &t.bump_version, &t.fail,
                          &PyDict_Type, &t.dual, &t.dual_level, &PyDict_Type, &t.environment, &t.debug_name,
                          &t.debug_on, &PyDict_Type, &t.profiler, &t.profiling, &t.event))
        return NULL;
    t.api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (t.api == NULL)
        return NULL;
    if (t.api->version.major != 1 || t.api->view == NULL || t.api->current_stream == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "torch's DLPack has another version");
        return NULL;
    }
    t.requires_grad = PyUnicode_InternFromString("requires_grad");
    Py_INCREF(args); /* owns everything above, as long as the process lives */
    Py_INCREF(capsule);
    torch_ = t;
    Py_RETURN_NONE;
}

static PyObject *set_cuda(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long launch, get_device, is_capturing;
    if (!PyArg_ParseTuple(args, "KKK", &launch, &get_device, &is_capturing))
        return NULL;
    set_driver((void *)(uintptr_t)launch, (void *)(uintptr_t)get_device, (void *)(uintptr_t)is_capturing);
    Py_RETURN_NONE;
}

/* set_direct(place, is_neg, is_inference, bump_version): addresses of libtorch's functions; 0: ask Python. */
static PyObject *set_direct(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long place, is_neg, is_inference, bump;
    if (!PyArg_ParseTuple(args, "KKKK", &place, &is_neg, &is_inference, &bump))
        return NULL;
    direct.place = (size_t)place;
    *(void **)&direct.is_neg = (void *)(uintptr_t)is_neg;
    *(void **)&direct.is_inference = (void *)(uintptr_t)is_inference;
    *(void **)&direct.bump_version = (void *)(uintptr_t)bump;
    Py_RETURN_NONE;
}

static PyObject *forget(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    forget_kept();
    Py_RETURN_NONE;
}

static PyObject *set_enabled(PyObject *module, PyObject *on)
{
    (void)module;
    enabled = PyObject_IsTrue(on);
    Py_RETURN_NONE;
}

static PyObject *set_recording(PyObject *module, PyObject *on)
{
    (void)module;
    recording = PyObject_IsTrue(on);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_up", set_up, METH_VARARGS, "Tell what is needed of torch."},
    {"set_cuda", set_cuda, METH_VARARGS, "The addresses of cuLaunchKernelEx, cuCtxGetDevice and cuStreamIsCapturing."},
    {"set_direct", set_direct, METH_VARARGS, "Where tensors hold libtorch's, and addresses of its functions."},
    {"forget", forget, METH_NOARGS, "Take memory anew that was kept for streams."},
    {"set_enabled", set_enabled, METH_O, "Turn all tables on or off."},
    {"set_recording", set_recording, METH_O, "Whether this thread is recording: then its calls are not repeated."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Calls that are like earlier ones.", -1,
                                        methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *type = PyType_FromSpec(&table_spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Table", type) != 0 || init_scratch() != 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    Py_DECREF(type);
    if (PyModule_AddStringConstant(module, "SOURCES", SOURCES_DIGEST) != 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
