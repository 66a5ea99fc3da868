/* A stock of lent buffers, as _lanes_stock.c keeps it and _lanes_reader.c uses it. */
#ifndef LYNX_NET_LANES_STOCK_H
#define LYNX_NET_LANES_STOCK_H

#include "_lanes.h"

#include <pthread.h>

enum { MAX_LANES = 64 }; /* as in handshake.py */
enum { STACKS = 16, HOME_BITS = 10 };

typedef struct Loan {
    struct Loan *next;
    Py_buffer view;
} Loan;

typedef struct {
    uint64_t transfer;
    uint32_t stream, bytes;
    size_t count; /* never 0 */
    Loan *loans[STACKS]; /* by the lane that filled them last: its core may still have their memory */
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
    const void *memory;
    size_t stack;
} Home;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex; /* never held while waiting for anything, nor while objects are made */
    Shelf *shelves; /* those that are in use are first */
    size_t used, room;
    size_t loans;  /* that exist */
    Segment *full; /* of all lanes, in order; there is room for all loans */
    size_t full_count, full_room, full_bytes;
    size_t enough_bytes; /* of which Python is told at once */
    int64_t full_since_ns, told_ns;  /* when the first of them came; when a reader left in order to tell */
    int mixed; /* they are of several streams */
    int teller, due, over; /* a thread tells Python in place of readers; is to do so; and is needed no more */
    pthread_cond_t due_or_over;
    Count untold[MAX_LANES]; /* what each lane has received */
    Home homes[1 << HOME_BITS]; /* which lane has filled which memory; later ones take the place of earlier ones */
} Stock;

/* With the mutex. */
Shelf *lanes_find_shelf(const Stock *stock, uint64_t transfer, uint32_t stream, uint32_t bytes);
void lanes_push(Stock *stock, uint64_t transfer, uint32_t stream, Loan *loan);
Loan *lanes_pop(Stock *stock, Shelf *shelf, size_t lane);
Home *lanes_home_of(Stock *stock, const void *memory);

/* Without it, but with the interpreter. */
void lanes_free_loan(Stock *stock, Loan *loan);
PyObject *lanes_give_back(Stock *stock, Loan *loan);

void lanes_free_object(PyObject *self);

PyObject *lanes_make_reader(PyObject *stock, PyObject *args);
extern PyType_Spec lanes_reader_spec;

#endif
