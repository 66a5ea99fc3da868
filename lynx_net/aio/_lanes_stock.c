/* Buffers that Python has lent for whole streams of pages, by transfer, stream and size, and what is full of them.
 *
 * The readers of _lanes_reader.c fill them. What is full goes to the stock, and the first reader that finds it to be
 * enough, or old enough, lets its thread tell Python of all of it: the others go on. Or it wakes a thread that has come
 * for that, the teller: then all of them go on.
 * A buffer has one owner at a time: the stock, one reader, or Python; its bytes belong to the reader until it is full.
 */
#include "_lanes_stock.h"

/* Where it stands which lane has filled this memory last. */
Home *lanes_home_of(Stock *stock, const void *memory)
{
    return &stock->homes[((uint64_t)(uintptr_t)memory >> 12) * 0x9E3779B97F4A7C15u >> (64 - HOME_BITS)]; /* Fibonacci hashing */
}

void lanes_free_loan(Stock *stock, Loan *loan)
{
    pthread_mutex_lock(&stock->mutex);
    stock->loans--;
    pthread_mutex_unlock(&stock->mutex);
    PyBuffer_Release(&loan->view);
    PyMem_Free(loan);
}

/* The buffer itself, and nothing is left of the loan. Steals it. */
PyObject *lanes_give_back(Stock *stock, Loan *loan)
{
    PyObject *buffer = Py_NewRef(loan->view.obj);
    lanes_free_loan(stock, loan);
    return buffer;
}

Shelf *lanes_find_shelf(const Stock *stock, uint64_t transfer, uint32_t stream, uint32_t bytes)
{
    for (size_t index = 0; index < stock->used; index++) {
        Shelf *shelf = &stock->shelves[index];
        if (shelf->transfer == transfer && shelf->stream == stream && shelf->bytes == bytes)
            return shelf;
    }
    return NULL;
}

/* There must be room for a shelf more. */
void lanes_push(Stock *stock, uint64_t transfer, uint32_t stream, Loan *loan)
{
    uint32_t bytes = (uint32_t)loan->view.len;
    Shelf *shelf = lanes_find_shelf(stock, transfer, stream, bytes);
    if (shelf == NULL) {
        shelf = &stock->shelves[stock->used++];
        *shelf = (Shelf){.transfer = transfer, .stream = stream, .bytes = bytes};
    }
    const Home *home = lanes_home_of(stock, loan->view.buf);
    size_t stack = home->memory == loan->view.buf ? home->stack : 0;
    loan->next = shelf->loans[stack];
    shelf->loans[stack] = loan;
    shelf->count++;
}

/* What this lane filled last, whose memory is warmest, or else any. */
Loan *lanes_pop(Stock *stock, Shelf *shelf, size_t lane)
{
    size_t stack = lane % STACKS;
    while (shelf->loans[stack] == NULL)
        stack = (stack + 1) % STACKS;
    Loan *loan = shelf->loans[stack];
    shelf->loans[stack] = loan->next;
    if (--shelf->count == 0)
        *shelf = stock->shelves[--stock->used];
    return loan;
}

/* An array with room for more; NULL, and it stays as it was, where there is no memory. */
static void *grown(void *array, size_t *room, size_t item_bytes)
{
    void *more = PyMem_Realloc(array, (2 * *room + 16) * item_bytes);
    if (more != NULL)
        *room = 2 * *room + 16;
    return more;
}

/* Room for a loan more, on a shelf of its own. Only where the interpreter is locked: then nobody else adds any before it
 * is used. */
static int make_room(Stock *stock)
{
    int failed = 0;
    pthread_mutex_lock(&stock->mutex);
    if (stock->used == stock->room) {
        Shelf *more = grown(stock->shelves, &stock->room, sizeof *more);
        failed = more == NULL;
        stock->shelves = failed ? stock->shelves : more;
    }
    if (!failed && stock->loans == stock->full_room) {
        Segment *more = grown(stock->full, &stock->full_room, sizeof *more);
        failed = more == NULL;
        stock->full = failed ? stock->full : more;
    }
    stock->loans += !failed;
    pthread_mutex_unlock(&stock->mutex);
    return failed ? -1 : 0;
}

PyDoc_STRVAR(put_doc, "put(transfer, stream, buffers, together_bytes)\n--\n\n"
                      "Lend writable buffers, each for a whole page of its size; they are the stock's until it hands them back.\n"
                      "A reader comes back when all have received `together_bytes` of the stream, or earlier.");

static PyObject *stock_put(PyObject *self, PyObject *args)
{
    Stock *stock = (Stock *)self;
    unsigned long long transfer;
    unsigned int stream;
    PyObject *buffers;
    Py_ssize_t together_bytes;
    if (!PyArg_ParseTuple(args, "KIO!n:put", &transfer, &stream, &PyList_Type, &buffers, &together_bytes))
        return NULL;
    for (Py_ssize_t index = 0; index < PyList_Size(buffers); index++) {
        Loan *loan = PyMem_Calloc(1, sizeof *loan);
        if (loan == NULL || make_room(stock) < 0) {
            PyMem_Free(loan);
            return PyErr_NoMemory();
        }
        if (PyObject_GetBuffer(PyList_GetItem(buffers, index), &loan->view, PyBUF_WRITABLE) < 0) {
            lanes_free_loan(stock, loan); /* releases no buffer: there is none */
            return NULL;
        }
        if ((uint64_t)loan->view.len > UINT32_MAX) {
            lanes_free_loan(stock, loan);
            PyErr_SetString(PyExc_ValueError, "a page of a stream has at most 4294967295 bytes");
            return NULL;
        }
        pthread_mutex_lock(&stock->mutex);
        lanes_push(stock, transfer, stream, loan);
        pthread_mutex_unlock(&stock->mutex);
    }
    pthread_mutex_lock(&stock->mutex);
    for (size_t index = 0; index < stock->used; index++) {
        Shelf *shelf = &stock->shelves[index];
        if (shelf->transfer == transfer && shelf->stream == stream)
            shelf->together_bytes = together_bytes > 0 ? (size_t)together_bytes : 0;
    }
    pthread_mutex_unlock(&stock->mutex);
    return Py_NewRef(Py_None);
}

/* All loans of a stream, or of every stream (-1), of a transfer or of all (any). */
static Loan *take_loans(Stock *stock, int any, uint64_t transfer, int stream)
{
    Loan *taken = NULL;
    pthread_mutex_lock(&stock->mutex);
    for (size_t index = 0; index < stock->used;) {
        Shelf *shelf = &stock->shelves[index];
        if (!any && (shelf->transfer != transfer || (stream >= 0 && shelf->stream != (uint32_t)stream))) {
            index++;
            continue;
        }
        Loan *loan = lanes_pop(stock, shelf, 0); /* the last one takes the shelf with it: look here again */
        loan->next = taken;
        taken = loan;
    }
    pthread_mutex_unlock(&stock->mutex);
    return taken;
}

PyDoc_STRVAR(take_back_doc, "take_back(transfer, stream)\n--\n\n"
                            "End the loans of a stream (-1: of all streams) of a transfer that no reader uses; returns the buffers.");

static PyObject *stock_take_back(PyObject *self, PyObject *args)
{
    unsigned long long transfer;
    int stream;
    if (!PyArg_ParseTuple(args, "Ki:take_back", &transfer, &stream))
        return NULL;
    PyObject *buffers = PyList_New(0);
    Loan *loan = buffers != NULL ? take_loans((Stock *)self, 0, transfer, stream) : NULL;
    while (loan != NULL) {
        Loan *next = loan->next;
        PyObject *buffer = lanes_give_back((Stock *)self, loan);
        if (buffers != NULL && PyList_Append(buffers, buffer) < 0)
            Py_CLEAR(buffers);
        Py_DECREF(buffer);
        loan = next;
    }
    return buffers;
}

static PyObject *stock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, ":Stock"))
        return NULL;
    Stock *self = (Stock *)PyType_GenericNew(type, args, kwargs);
    if (self != NULL) {
        pthread_mutex_init(&self->mutex, NULL);
        pthread_cond_init(&self->due_or_over, NULL);
        self->enough_bytes = SIZE_MAX;
    }
    return (PyObject *)self;
}

void lanes_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void stock_dealloc(PyObject *self)
{
    Stock *stock = (Stock *)self;
    for (Loan *loan = take_loans(stock, 1, 0, 0), *next; loan != NULL; loan = next) {
        next = loan->next;
        lanes_free_loan(stock, loan);
    }
    for (size_t index = 0; index < stock->full_count; index++)
        lanes_free_loan(stock, stock->full[index].loan);
    PyMem_Free(stock->full);
    PyMem_Free(stock->shelves);
    pthread_cond_destroy(&stock->due_or_over);
    pthread_mutex_destroy(&stock->mutex);
    lanes_free_object(self);
}

/* Whether `next` goes on with the run that `first` begins. What is wrong stands alone. */
static int is_alike(const Segment *first, const Segment *next)
{
    return first->transfer == next->transfer && first->stream == next->stream && first->bytes == next->bytes
        && first->sum == first->checksum && next->sum == next->checksum;
}

/* A run of full segments; the references to their buffers are its, or gone. */
static PyObject *build_run(Stock *stock, Segment *first, size_t count)
{
    PyObject *pages = PyList_New((Py_ssize_t)count), *buffers = PyList_New((Py_ssize_t)count);
    for (size_t index = 0; index < count; index++) {
        PyObject *buffer = lanes_give_back(stock, first[index].loan);
        PyObject *page = pages != NULL && buffers != NULL ? PyLong_FromUnsignedLong(first[index].page) : NULL;
        if (page == NULL) {
            Py_DECREF(buffer);
            Py_CLEAR(pages);
            Py_CLEAR(buffers);
            continue;
        }
        PyList_SetItem(pages, (Py_ssize_t)index, page); /* cannot fail, and steal what they are given */
        PyList_SetItem(buffers, (Py_ssize_t)index, buffer);
    }
    if (pages == NULL || buffers == NULL) {
        Py_XDECREF(pages);
        Py_XDECREF(buffers);
        return NULL;
    }
    return Py_BuildValue("KIINNO", (unsigned long long)first->transfer, first->stream, first->bytes, pages, buffers,
                         first->sum == first->checksum ? Py_True : Py_False);
}

/* What is full, in runs. The loans are gone in any case. */
static PyObject *build_runs(Stock *stock, Segment *full, size_t count)
{
    PyObject *runs = PyList_New(0);
    for (size_t index = 0, end; index < count; index = end) {
        for (end = index + 1; end < count && is_alike(&full[index], &full[end]);)
            end++;
        PyObject *run = build_run(stock, &full[index], end - index);
        if (runs != NULL && (run == NULL || PyList_Append(runs, run) < 0))
            Py_CLEAR(runs);
        Py_XDECREF(run);
    }
    return runs;
}

static PyObject *build_counts(const Count *untold)
{
    PyObject *counts = PyList_New(0);
    for (size_t lane = 0; counts != NULL && lane < MAX_LANES; lane++) {
        if (untold[lane].bytes == 0)
            continue;
        PyObject *count = Py_BuildValue("nnn", lane, untold[lane].segments, untold[lane].bytes);
        if (count == NULL || PyList_Append(counts, count) < 0)
            Py_CLEAR(counts);
        Py_XDECREF(count);
    }
    return counts;
}

PyDoc_STRVAR(take_full_doc,
             "take_full()\n--\n\n"
             "What all lanes have received since the last time: the full segments, in order, as LentRun of\n"
             "lynx_net/wire/lending.py, and (lane, segments, bytes) of each lane.");

static PyObject *stock_take_full(PyObject *self, PyObject *nothing)
{
    Stock *stock = (Stock *)self;
    Segment *full = NULL;
    Count untold[MAX_LANES];
    size_t room = 0, count;
    for (;;) {
        pthread_mutex_lock(&stock->mutex);
        count = stock->full_count;
        if (count <= room) {
            if (count)
                memcpy(full, stock->full, count * sizeof *full);
            memcpy(untold, stock->untold, sizeof untold);
            memset(stock->untold, 0, sizeof stock->untold);
            stock->full_count = stock->full_bytes = 0;
            stock->enough_bytes = SIZE_MAX;
            stock->mixed = 0;
            stock->told_ns = 0;
        }
        pthread_mutex_unlock(&stock->mutex);
        if (count <= room)
            break;
        room = count + 16;
        Segment *more = PyMem_Realloc(full, room * sizeof *more);
        if (more == NULL) {
            PyMem_Free(full);
            return PyErr_NoMemory();
        }
        full = more;
    }
    PyObject *runs = build_runs(stock, full, count);
    PyMem_Free(full);
    PyObject *counts = runs != NULL ? build_counts(untold) : NULL;
    if (counts == NULL) {
        Py_XDECREF(runs);
        return NULL;
    }
    return Py_BuildValue("NN", runs, counts);
}

PyDoc_STRVAR(wait_full_doc,
             "wait_full()\n--\n\n"
             "For a thread that calls take_full() in place of readers, and then this again, until it returns False: since\n"
             "end_wait() nobody is to wait. From the first call on readers come back only with headers that Python has to\n"
             "read, or when nothing has come for as long as they were told to wait.");

static PyObject *stock_wait_full(PyObject *self, PyObject *nothing)
{
    Stock *stock = (Stock *)self;
    PyThreadState *state = PyEval_SaveThread();
    pthread_mutex_lock(&stock->mutex);
    stock->teller |= !stock->over;
    while (!stock->due && stock->teller)
        pthread_cond_wait(&stock->due_or_over, &stock->mutex);
    int is_due = stock->teller;
    stock->due = 0;
    pthread_mutex_unlock(&stock->mutex);
    PyEval_RestoreThread(state);
    return PyBool_FromLong(is_due);
}

PyDoc_STRVAR(end_wait_doc, "end_wait()\n--\n\nReaders tell Python themselves from now on, and wait_full() returns False.");

static PyObject *stock_end_wait(PyObject *self, PyObject *nothing)
{
    Stock *stock = (Stock *)self;
    pthread_mutex_lock(&stock->mutex);
    stock->teller = 0;
    stock->over = 1;
    pthread_cond_broadcast(&stock->due_or_over);
    pthread_mutex_unlock(&stock->mutex);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(reader_doc, "reader(lane)\n--\n\n"
                         "A reader for one connection of a lane, which fills buffers of this stock.");

/* ---- the type */

static PyMethodDef stock_methods[] = {
    {"put", stock_put, METH_VARARGS, put_doc},
    {"take_back", stock_take_back, METH_VARARGS, take_back_doc},
    {"take_full", stock_take_full, METH_NOARGS, take_full_doc},
    {"wait_full", stock_wait_full, METH_NOARGS, wait_full_doc},
    {"end_wait", stock_end_wait, METH_NOARGS, end_wait_doc},
    {"reader", lanes_make_reader, METH_VARARGS, reader_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot stock_slots[] = {
    {Py_tp_doc, "Buffers lent for whole streams of pages, by transfer, stream and size."},
    {Py_tp_methods, stock_methods},
    {Py_tp_new, stock_new},
    {Py_tp_dealloc, stock_dealloc},
    {0, NULL},
};

static PyType_Spec stock_spec = {
    .name = "lynx_net.aio._lanes.Stock",
    .basicsize = sizeof(Stock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = stock_slots,
};

int lanes_add_stock(PyObject *module)
{
    PyType_Spec *specs[] = {&stock_spec, &lanes_reader_spec};
    for (size_t index = 0; index < 2; index++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[index], NULL);
        int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
        Py_XDECREF(type);
        if (failed)
            return -1;
    }
    return 0;
}
