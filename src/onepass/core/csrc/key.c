/* The key of a call: everything that its launches depend on, except addresses. */

#include "native.h"

#include <string.h>

/* Tags of options. */
enum { NONE = 1, FALSE_ = 2, TRUE_ = 3, FLOAT = 4, INT = 5, STRING = 6, DTYPE = 7 };

static const uint64_t ABSENT = ~(uint64_t)0;

/* Whether a tensor may be written here, which a tensor of inference mode may not be elsewhere. */
static int may_write(Key *key, int position, PyObject *object)
{
    int inference = is_inference(object);
    if (inference == 0)
        key->versioned |= (uint32_t)1 << position;
    else if (!key->in_inference_mode) /* asked once */
        key->in_inference_mode = inference == 1 && in_inference_mode() == 1;
    return inference == 0 || key->in_inference_mode;
}

static inline int put(Key *key, uint64_t word)
{
    if (key->count == MAX_KEY)
        return 0;
    key->words[key->count++] = word;
    return 1;
}

static int add_tensor(Key *key, int position, PyObject *object, int flags, int grad)
{
    Seen *seen = &key->seen[position];
    seen->object = NULL;
    seen->start = seen->end = 0;
    if (object == Py_None)
        return put(key, ABSENT);
    PyTypeObject *type = Py_TYPE(object);
    if (type != torch_.tensor && type != torch_.parameter)
        return 0;
    DLView view;
    if (torch_.api->view(object, &view) != 0) { /* not strided, or on a device that DLPack does not know */
        PyErr_Clear();
        return 0;
    }
    if ((view.device_type != DL_CPU && view.device_type != DL_CUDA) || view.ndim < 0 || view.ndim > 255)
        return 0;
    int contiguous = 1, natural = 1, empty = 0, dims = view.ndim;
    uint64_t expected = 1, last = 0; /* unsigned: an empty tensor may have sizes whose product overflows */
    for (int d = dims - 1; d >= 0; d--) {
        int64_t size = view.shape[d];
        if (size == 0)
            empty = 1;
        natural &= (uint64_t)view.strides[d] == expected; /* a dimension of size 1 may have any stride */
        if (size != 1) {
            contiguous &= (uint64_t)view.strides[d] == expected;
            expected *= (uint64_t)size;
            last += (uint64_t)(size - 1) * (uint64_t)view.strides[d];
        }
    }
    contiguous |= empty;
    uintptr_t start = (uintptr_t)view.data + view.byte_offset;
    if (is_negated(object) != 0 || ((flags & IS_WRITTEN) && !may_write(key, position, object)) ||
        (grad && requires_grad(object) != 0)) {
        PyErr_Clear();
        return 0;
    }
    uint64_t header = (uint64_t)view.code | (uint64_t)view.bits << 8 | (uint64_t)view.lanes << 16;
    header |= (uint64_t)(view.device_id & 0xFFF) << 32 | (uint64_t)dims << 44 | (uint64_t)view.device_type << 52;
    header |= (uint64_t)(start & 15) << 56 | (uint64_t)contiguous << 60 | (uint64_t)natural << 61;
    if (key->count + 1 + 2 * dims > MAX_KEY)
        return 0;
    uint64_t *words = key->words + key->count;
    *words++ = header;
    for (int d = 0; d < dims; d++)
        *words++ = (uint64_t)view.shape[d];
    if (!contiguous)
        for (int d = 0; d < dims; d++)
            *words++ = (uint64_t)view.strides[d];
    key->count = (int)(words - key->words);
    key->on_cpu |= view.device_type == DL_CPU;
    seen->object = object;
    if (!empty) {
        seen->start = start;
        seen->end = start + (uintptr_t)(last + 1) * (uintptr_t)((view.bits * view.lanes + 7) / 8);
    }
    return 1;
}

static int add_option(Key *key, PyObject *value)
{
    if (value == Py_None)
        return put(key, NONE);
    if (value == Py_False)
        return put(key, FALSE_);
    if (value == Py_True)
        return put(key, TRUE_);
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return put(key, FLOAT) && put(key, bits);
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow && put(key, INT) && put(key, (uint64_t)number);
    }
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        if (text == NULL) {
            PyErr_Clear();
            return 0;
        }
        if (!put(key, STRING | (uint64_t)size << 8))
            return 0;
        for (Py_ssize_t i = 0; i < size; i += 8) {
            uint64_t word = 0;
            memcpy(&word, text + i, (size_t)(size - i < 8 ? size - i : 8));
            if (!put(key, word))
                return 0;
        }
        return 1;
    }
    if (Py_TYPE(value) == torch_.dtype) /* each dtype is one object, which is never freed */
        return put(key, DTYPE) && put(key, (uint64_t)(uintptr_t)value);
    return 0;
}

/* Tensors that start at the same address, and those that overlap one that is written: their distance. */
static int add_relations(Key *key, const Form *form, int tensors)
{
    for (int i = 0; i < tensors; i++) {
        const Seen *a = &key->seen[i];
        if (a->start == a->end)
            continue;
        for (int j = i + 1; j < tensors; j++) {
            const Seen *b = &key->seen[j];
            if (b->start == b->end)
                continue;
            int meet = a->start < b->end && b->start < a->end;
            int written = (form->flags[i] | form->flags[j]) & IS_WRITTEN;
            if (a->start == b->start || (meet && written)) {
                if (!put(key, (uint64_t)(i << 8 | j) | (uint64_t)1 << 32) || !put(key, (uint64_t)(b->start - a->start)))
                    return 0;
            }
        }
    }
    return 1;
}

int make_key(const Form *form, PyObject *const *args, int grad, Key *key)
{
    key->count = 0;
    key->on_cpu = 0;
    key->in_inference_mode = 0;
    key->versioned = 0;
    int tensors = form->inputs + form->outputs;
    for (int i = 0; i < tensors; i++) {
        PyObject *object = args[i < form->inputs ? i : i + form->options];
        if (form->flags[i] & IS_LIST) {
            int none = (PyTuple_CheckExact(object) && PyTuple_Size(object) == 0) ||
                       (PyList_CheckExact(object) && PyList_Size(object) == 0);
            if (!none)
                return 0;
            key->seen[i].object = NULL;
            key->seen[i].start = key->seen[i].end = 0;
        } else if (!add_tensor(key, i, object, form->flags[i], grad)) {
            return 0;
        }
    }
    if (key->seen[0].object == NULL)
        return 0;
    for (int i = 0; i < form->options; i++)
        if (!add_option(key, args[form->inputs + i]))
            return 0;
    if (!add_relations(key, form, tensors))
        return 0;
    if (key->on_cpu) { /* the number of threads decides how work is shared */
        PyObject *threads = PyObject_CallNoArgs(torch_.threads);
        if (threads == NULL)
            return -1;
        int added = put(key, (uint64_t)PyLong_AsLong(threads));
        Py_DECREF(threads);
        if (!added)
            return 0;
    }
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (int i = 0; i < key->count; i++) {
        hash = (hash ^ key->words[i]) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
    }
    key->hash = hash;
    return 1;
}
