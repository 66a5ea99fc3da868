/* Receiving whole streams of pages into buffers that Python has lent, many in one call, without the interpreter.
 *
 * A Stock holds the buffers of a link, by transfer, stream and size; a Reader takes the segments of one connection as
 * long as each of them is a whole stream of a page for which there is a buffer. What is full goes to the stock, and the
 * first reader that finds it to be enough, or old enough, lets its thread tell Python of all of it: the others go on. Or it
 * wakes a thread that has come for that, the teller: then all of them go on.
 * Nothing is decided here: Python checks every header and every sum afterwards (lynx_net/wire/lending.py), and gets the
 * headers of all that is not so simple to read them itself. A buffer has one owner at a time: the stock, one reader, or
 * Python; its bytes belong to the reader until it is full.
 */
#include "_lanes.h"

#include <pthread.h>
#include <stdatomic.h>

enum { MAX_BURST = 256 };          /* segments whose headers may come before their payloads, as in frames.py */
enum { MAX_LANES = 64 };           /* as in handshake.py */
enum { STACKS = 16 };
enum { LEAST_PIECE = 1 << 16, MOST_PIECE = 1 << 18 };
enum { MOST_PAUSE_NS = 300000 };
enum { TELL_NS = 3000000, TELL_MIXED_NS = 500000 }; /* Python hears of a full page after so long, or of several streams */

typedef struct Loan {
    struct Loan *next;
    Py_buffer view;
} Loan;

typedef struct {
    uint64_t transfer;
    uint32_t stream, bytes;
    size_t count; /* never 0 */
    Loan *loans[STACKS]; /* by the thread that lent it: that had it last, and its core may still have its memory */
    size_t together_bytes; /* when a reader has so much of the stream, Python wants to know */
} Shelf;

typedef struct {
    uint64_t transfer, checksum, sum;
    uint32_t page, stream, bytes;
    int last; /* nothing follows it at once */
    size_t together_bytes;
    Loan *loan;
} Segment;

typedef struct {
    size_t segments, bytes;
} Count;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex; /* never held while waiting for anything, nor while objects are made */
    Shelf *shelves; /* those that are in use are first */
    size_t used, room;
    size_t loans;  /* that exist */
    Segment *full; /* of all lanes, in order; there is room for all loans */
    size_t full_count, full_room, full_bytes;
    size_t enough_bytes, most_bytes; /* of which Python is told at once, now and at most */
    int64_t full_since_ns, told_ns;  /* when the first of them came; when a reader left in order to tell */
    int mixed; /* they are of several streams */
    int teller, due, over; /* a thread tells Python in place of readers; is to do so; and is needed no more */
    pthread_cond_t due_or_over;
    Count untold[MAX_LANES]; /* what each lane has received */
} Stock;

/* Which stack is this thread's. */
static size_t own_stack(void)
{
    static atomic_size_t threads;
    static _Thread_local size_t number;
    if (number == 0)
        number = 1 + atomic_fetch_add(&threads, 1) % STACKS;
    return number - 1;
}

static void free_loan(Stock *stock, Loan *loan)
{
    pthread_mutex_lock(&stock->mutex);
    stock->loans--;
    pthread_mutex_unlock(&stock->mutex);
    PyBuffer_Release(&loan->view);
    PyMem_Free(loan);
}

/* The buffer itself, and nothing is left of the loan. Steals it. */
static PyObject *give_back(Stock *stock, Loan *loan)
{
    PyObject *buffer = Py_NewRef(loan->view.obj);
    free_loan(stock, loan);
    return buffer;
}

static Shelf *find_shelf(const Stock *stock, uint64_t transfer, uint32_t stream, uint32_t bytes)
{
    for (size_t index = 0; index < stock->used; index++) {
        Shelf *shelf = &stock->shelves[index];
        if (shelf->transfer == transfer && shelf->stream == stream && shelf->bytes == bytes)
            return shelf;
    }
    return NULL;
}

/* There must be room for a shelf more. */
static void push(Stock *stock, uint64_t transfer, uint32_t stream, Loan *loan)
{
    uint32_t bytes = (uint32_t)loan->view.len;
    Shelf *shelf = find_shelf(stock, transfer, stream, bytes);
    if (shelf == NULL) {
        shelf = &stock->shelves[stock->used++];
        *shelf = (Shelf){.transfer = transfer, .stream = stream, .bytes = bytes};
    }
    size_t own = own_stack();
    loan->next = shelf->loans[own];
    shelf->loans[own] = loan;
    shelf->count++;
}

/* What this thread lent last, whose memory is warmest, or else any. */
static Loan *pop(Stock *stock, Shelf *shelf)
{
    size_t stack = own_stack();
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
            free_loan(stock, loan); /* releases no buffer: there is none */
            return NULL;
        }
        if ((uint64_t)loan->view.len > UINT32_MAX) {
            free_loan(stock, loan);
            PyErr_SetString(PyExc_ValueError, "a page of a stream has at most 4294967295 bytes");
            return NULL;
        }
        pthread_mutex_lock(&stock->mutex);
        push(stock, transfer, stream, loan);
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
        Loan *loan = pop(stock, shelf); /* the last one takes the shelf with it: look here again */
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
        PyObject *buffer = give_back((Stock *)self, loan);
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
    }
    return (PyObject *)self;
}

static void free_object(PyObject *self)
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
        free_loan(stock, loan);
    }
    for (size_t index = 0; index < stock->full_count; index++)
        free_loan(stock, stock->full[index].loan);
    PyMem_Free(stock->full);
    PyMem_Free(stock->shelves);
    pthread_cond_destroy(&stock->due_or_over);
    pthread_mutex_destroy(&stock->mutex);
    free_object(self);
}

/* ---- one connection */

typedef struct {
    PyObject_HEAD
    PyObject *stock;
    size_t lane;
    Receiving burst; /* its payloads are those of `coming` */
    Segment coming[MAX_BURST];
    struct iovec payloads[MAX_BURST];
    uint64_t sums[MAX_BURST];
    size_t taken; /* of the burst, those that the stock has */
    unsigned char headers[MAX_BURST * HEADER_BYTES];
    size_t headers_filled, headers_wanted;
    int refused; /* the headers are for Python */
    size_t piece_bytes;
    int64_t burst_began_ns;
    int64_t pause_ns; /* so long a next burst is awaited before Python is told of what is full */
} Reader;

static uint32_t get32(const unsigned char *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return le32toh(value);
}

static uint64_t get64(const unsigned char *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return le64toh(value);
}

static unsigned int get_following(const unsigned char *header)
{
    return header[2] | (unsigned int)header[3] << 8;
}

/* A whole stream of a page, in a header that is sound and says that so many follow; what it is to be in has to be seen. */
static int read_header(const unsigned char *header, size_t following, Segment *segment)
{
    uint32_t flags = get32(header + 28);
    if (header[0] != SEGMENT || get_following(header) != following || flags > (following ? 0 : LAST)
        || lanes_hash(header, SUMMED_BYTES) != get64(header + 40))
        return 0;
    *segment = (Segment){
        .transfer = get64(header + 8),
        .checksum = get64(header + 32),
        .page = get32(header + 16),
        .stream = header[1],
        .bytes = get32(header + 4),
        .last = flags == LAST,
    };
    return get32(header + 20) == 0 && get32(header + 24) == segment->bytes;
}

/* Buffers for all segments of the burst whose headers are there, or for none. */
static int claim(Reader *self, size_t count)
{
    Stock *stock = (Stock *)self->stock;
    size_t claimed = 0;
    pthread_mutex_lock(&stock->mutex);
    for (; claimed < count; claimed++) {
        Segment *segment = &self->coming[claimed];
        Shelf *shelf = find_shelf(stock, segment->transfer, segment->stream, segment->bytes);
        if (shelf == NULL)
            break;
        segment->together_bytes = shelf->together_bytes;
        segment->loan = pop(stock, shelf);
    }
    int all = claimed == count;
    while (!all && claimed-- > 0) /* there is room: no shelf has been added meanwhile */
        push(stock, self->coming[claimed].transfer, self->coming[claimed].stream, self->coming[claimed].loan);
    pthread_mutex_unlock(&stock->mutex);
    return all;
}

/* All headers of a burst are there: make places for the payloads, or leave them to Python. */
static void begin_burst(Reader *self)
{
    size_t count = self->headers_filled / HEADER_BYTES, index = 0;
    while (index < count && read_header(self->headers + index * HEADER_BYTES, count - 1 - index, &self->coming[index]))
        index++;
    if (index < count || !claim(self, count)) {
        self->refused = 1;
        return;
    }
    for (index = 0; index < count; index++)
        self->payloads[index] = (struct iovec){self->coming[index].loan->view.buf, self->coming[index].bytes};
    self->burst.count = count;
    self->burst.done = self->burst.filled = self->taken = 0;
    lanes_account(&self->burst, 0); /* the first may be empty, or all */
    self->headers_filled = 0;
    self->headers_wanted = HEADER_BYTES;
    self->burst_began_ns = lanes_now_ns();
}

/* Bytes have come, some of which may have filled payloads: they are the stock's. A burst that is over is worth a pause as
 * long as it took, if more of its stream is expected and its sender has more: it hashes what it sends next, and is not done
 * with that when the receiver is; and to tell of every burst alone costs more than a burst. */
static void collect(Reader *self, size_t got)
{
    Stock *stock = (Stock *)self->stock;
    int64_t now = lanes_now_ns();
    pthread_mutex_lock(&stock->mutex);
    Count *untold = &stock->untold[self->lane];
    untold->bytes += got;
    for (; self->taken < self->burst.done; self->taken++) {
        Segment *segment = &stock->full[stock->full_count++];
        *segment = self->coming[self->taken];
        segment->sum = self->sums[self->taken];
        untold->segments++;
        stock->full_bytes += segment->bytes;
        if (stock->full_count == 1)
            stock->full_since_ns = now;
        if (segment->stream != stock->full[0].stream)
            stock->mixed = 1;
        if (segment->together_bytes < stock->enough_bytes)
            stock->enough_bytes = segment->together_bytes;
    }
    if (self->burst.count && self->taken == self->burst.count) {
        const Segment *last = &self->coming[self->taken - 1];
        int more = find_shelf(stock, last->transfer, last->stream, last->bytes) != NULL;
        int64_t took_ns = now - self->burst_began_ns;
        self->pause_ns = !more || last->last ? 0 : took_ns < MOST_PAUSE_NS ? took_ns : MOST_PAUSE_NS;
        self->burst.count = self->burst.done = self->taken = 0;
    }
    pthread_mutex_unlock(&stock->mutex);
}

/* Whether this lane has filled something of which Python has not been told. */
static int has_untold(Reader *self)
{
    Stock *stock = (Stock *)self->stock;
    pthread_mutex_lock(&stock->mutex);
    int has = stock->untold[self->lane].segments != 0;
    pthread_mutex_unlock(&stock->mutex);
    return has;
}

/* Whether this reader is to go and tell Python of what all have filled. The teller is told of that, where there is one. */
static int is_to_tell(Reader *self)
{
    Stock *stock = (Stock *)self->stock;
    int64_t now = lanes_now_ns();
    pthread_mutex_lock(&stock->mutex);
    int64_t most_ns = stock->mixed ? TELL_MIXED_NS : TELL_NS;
    int is_due = stock->full_count
        && (stock->full_bytes >= stock->enough_bytes || now - stock->full_since_ns > most_ns)
        && now - stock->told_ns > most_ns; /* or another one is on its way, and not late */
    if (is_due)
        stock->told_ns = now;
    int goes = is_due && !stock->teller;
    if (is_due && stock->teller) {
        stock->due = 1;
        pthread_cond_signal(&stock->due_or_over);
    }
    pthread_mutex_unlock(&stock->mutex);
    return goes;
}

/* Let the teller tell Python of what is full; 0 where there is none. */
static int leave_to_teller(Stock *stock)
{
    pthread_mutex_lock(&stock->mutex);
    int is_there = stock->teller;
    if (is_there && stock->full_count) {
        stock->due = 1;
        pthread_cond_signal(&stock->due_or_over);
    }
    pthread_mutex_unlock(&stock->mutex);
    return is_there;
}

/* Headers as far as they are there. Returns as recv does. */
static ssize_t receive_headers(Reader *self, int fd, int64_t wait_ns)
{
    unsigned char *to = self->headers + self->headers_filled;
    ssize_t got = lanes_receive_or_wait(fd, to, self->headers_wanted - self->headers_filled, wait_ns);
    if (got <= 0)
        return got;
    self->headers_filled += (size_t)got;
    if (self->headers_filled == HEADER_BYTES && self->headers_wanted == HEADER_BYTES && self->headers[0] == SEGMENT) {
        unsigned int following = get_following(self->headers);
        self->headers_wanted += HEADER_BYTES * (following < MAX_BURST ? following : 0);
    }
    if (self->headers_filled == self->headers_wanted)
        begin_burst(self);
    return got;
}

/* Bytes received, 0 at the end of the stream, -1 with errno: EINTR and EAGAIN if nothing came. Comes back when Python is
 * to be told, also soon after nothing more is there: the last page before a pause is awaited. Where a teller does that,
 * this waits on. */
static ssize_t read_on(Reader *self, int fd, int64_t wait_ns)
{
    ssize_t total = 0, got;
    int is_told = 0;
    do {
        if (self->burst.count) {
            size_t wanted;
            got = lanes_receive_piece(fd, &self->burst, has_untold(self) ? self->piece_bytes : MOST_PIECE, &wanted);
            if (got > 0) {
                lanes_account(&self->burst, (size_t)got);
                collect(self, (size_t)got);
                if ((size_t)got < wanted)
                    return total + got;
            }
        } else {
            got = receive_headers(self, fd, has_untold(self) && !is_told ? self->pause_ns : wait_ns);
            if (got > 0)
                collect(self, (size_t)got);
            else if (got < 0 && errno == EAGAIN && total && !is_told && leave_to_teller((Stock *)self->stock)) {
                is_told = 1;
                continue;
            }
            is_told = 0;
        }
        if (got <= 0)
            return total ? total : got;
        total += got;
    } while (!self->refused && !is_to_tell(self));
    return total;
}

static PyObject *fields(const Segment *one)
{
    return Py_BuildValue("KIIIIIK", (unsigned long long)one->transfer, one->page, one->stream, 0, one->bytes,
                         one->bytes, (unsigned long long)one->checksum);
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
        PyObject *buffer = give_back(stock, first[index].loan);
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
            stock->enough_bytes = stock->most_bytes;
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
             "end_wait() nobody is to wait. From the first call on readers come back only when nothing more is there.");

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

PyDoc_STRVAR(reader_receive_doc,
             "receive(fd, wait_s)\n--\n\n"
             "Receive segments as long as there are buffers for them, until there is something to do: take_full() first.\n\n"
             "Returns the bytes received, 0 at the end of the stream; the header fields of the segment that is being\n"
             "received, or None; and headers that Python has to read.");

static PyObject *reader_receive(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    int fd;
    double wait_s;
    if (!PyArg_ParseTuple(args, "id:receive", &fd, &wait_s))
        return NULL;
    if (!(wait_s >= 0 && wait_s < 1e6)) {
        PyErr_SetString(PyExc_ValueError, "wait_s is out of range");
        return NULL;
    }
    ssize_t total;
    for (;;) {
        PyThreadState *state = PyEval_SaveThread();
        int64_t began = lanes_now_ns();
        total = read_on(self, fd, (int64_t)(wait_s * 1e9));
        int error = errno;
        if (total > 0) { /* what comes in about a millisecond is waited for together */
            int64_t rate = (int64_t)total * 1000000 / (lanes_now_ns() - began + 1);
            self->piece_bytes = (size_t)(rate < LEAST_PIECE ? LEAST_PIECE : rate > MOST_PIECE ? MOST_PIECE : rate);
        }
        PyEval_RestoreThread(state);
        if (total >= 0)
            break;
        if (error != EINTR) {
            errno = error;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
    PyObject *coming = self->burst.count ? fields(&self->coming[self->burst.done]) : Py_NewRef(Py_None);
    PyObject *rest = PyBytes_FromStringAndSize((char *)self->headers, self->refused ? (Py_ssize_t)self->headers_filled : 0);
    if (self->refused) {
        self->refused = 0;
        self->headers_filled = 0;
        self->headers_wanted = HEADER_BYTES;
    }
    return Py_BuildValue("nNN", (Py_ssize_t)total, coming, rest);
}

PyDoc_STRVAR(abandon_doc, "abandon()\n--\n\n"
                          "Nothing more is received here: (transfer, stream, buffer) of each that was not filled.");

static PyObject *reader_abandon(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    PyObject *list = PyList_New(0);
    for (size_t index = self->burst.done; index < self->burst.count; index++) {
        Segment *segment = &self->coming[index];
        PyObject *buffer = give_back((Stock *)self->stock, segment->loan);
        PyObject *one = list == NULL
            ? NULL
            : Py_BuildValue("KIO", (unsigned long long)segment->transfer, segment->stream, buffer);
        Py_DECREF(buffer);
        if (list != NULL && (one == NULL || PyList_Append(list, one) < 0))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    self->burst.count = self->burst.done = self->taken = 0;
    return list;
}

static void reader_dealloc(PyObject *object)
{
    Reader *self = (Reader *)object;
    for (size_t index = self->taken; index < self->burst.count; index++)
        free_loan((Stock *)self->stock, self->coming[index].loan);
    if (self->burst.running != NULL)
        lanes_hash_free(self->burst.running);
    Py_XDECREF(self->stock);
    free_object(object);
}

PyDoc_STRVAR(reader_doc, "reader(lane, most_bytes)\n--\n\n"
                         "A reader for one connection of a lane, which fills buffers of this stock. It comes back when all its\n"
                         "readers together have filled so many bytes.");

static PyObject *stock_reader(PyObject *object, PyObject *args)
{
    Stock *stock = (Stock *)object;
    Py_ssize_t lane, most_bytes;
    if (!PyArg_ParseTuple(args, "nn:reader", &lane, &most_bytes))
        return NULL;
    if (lane < 0 || lane >= MAX_LANES || most_bytes < 1) {
        PyErr_Format(PyExc_ValueError, "a reader is of one of %d lanes and reads at least a byte", MAX_LANES);
        return NULL;
    }
    PyObject *type = PyObject_GetAttrString(PyType_GetModule(Py_TYPE(object)), "Reader");
    Reader *self = type != NULL ? (Reader *)PyType_GenericAlloc((PyTypeObject *)type, 0) : NULL;
    Py_XDECREF(type);
    if (self == NULL)
        return NULL;
    self->stock = Py_NewRef(object);
    self->lane = (size_t)lane;
    self->burst.payloads = self->payloads;
    self->burst.sums = self->sums;
    self->headers_wanted = HEADER_BYTES;
    self->piece_bytes = LEAST_PIECE;
    pthread_mutex_lock(&stock->mutex);
    stock->most_bytes = stock->enough_bytes = (size_t)most_bytes;
    pthread_mutex_unlock(&stock->mutex);
    self->burst.running = lanes_hash_create();
    if (self->burst.running == NULL) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

/* ---- the types */

static PyMethodDef reader_methods[] = {
    {"receive", reader_receive, METH_VARARGS, reader_receive_doc},
    {"abandon", reader_abandon, METH_NOARGS, abandon_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Receives the segments of one connection into buffers of a stock."},
    {Py_tp_methods, reader_methods},
    {Py_tp_dealloc, reader_dealloc},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "lynx_net.aio._lanes.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = reader_slots,
};

static PyMethodDef stock_methods[] = {
    {"put", stock_put, METH_VARARGS, put_doc},
    {"take_back", stock_take_back, METH_VARARGS, take_back_doc},
    {"take_full", stock_take_full, METH_NOARGS, take_full_doc},
    {"wait_full", stock_wait_full, METH_NOARGS, wait_full_doc},
    {"end_wait", stock_end_wait, METH_NOARGS, end_wait_doc},
    {"reader", stock_reader, METH_VARARGS, reader_doc},
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
    PyType_Spec *specs[] = {&stock_spec, &reader_spec};
    for (size_t index = 0; index < 2; index++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[index], NULL);
        int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
        Py_XDECREF(type);
        if (failed)
            return -1;
    }
    return 0;
}
