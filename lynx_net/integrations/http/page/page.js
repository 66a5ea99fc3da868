// Draws one request from the events of the server; lynx_net/integrations/http/bus.py says what each of them means.
// Everything that comes from there is put into text nodes and attributes, never into markup.

const LAST = new Set(["done", "error", "cancelled"]);
const LISTED = 40; // requests to choose from
const DRAW_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 500 : 100;
const SILENCE_MS = 40_000; // the server says something every 15 s
const HOLD_MS = 2_000; // so long an ended request stays, when the next one is already there
const SPEAK_MS = 4_000;
const STATES = {
  connecting: "connecting",
  watching: "watching",
  gone: "the server does not answer",
  key: "a key is needed",
};

const byId = (id) => document.getElementById(id);

// ---- connections

function keyHeader() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Server-sent events by fetch, which unlike EventSource can send a key and see a status. */
async function* readEvents(path, signal) {
  const inner = new AbortController();
  const stop = () => inner.abort();
  signal.addEventListener("abort", stop);
  let silence = setTimeout(stop, SILENCE_MS);
  try {
    const answer = await fetch(path, {
      headers: keyHeader(),
      cache: "no-store",
      signal: inner.signal,
    });
    if (!answer.ok) throw Object.assign(new Error(`status ${answer.status}`), { status: answer.status });
    yield null; // it is there
    let rest = "";
    for await (const piece of chunks(answer.body.pipeThrough(new TextDecoderStream()))) {
      clearTimeout(silence);
      silence = setTimeout(stop, SILENCE_MS);
      const blocks = (rest + piece).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data: "));
        if (data.length) yield JSON.parse(data.map((line) => line.slice(6)).join("\n"));
      }
    }
  } finally {
    clearTimeout(silence);
    signal.removeEventListener("abort", stop);
    inner.abort();
  }
}

async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

let wake = () => {}; // ends the wait before the next try

/** Waits, and tells `tell` the seconds left. */
function wait(ms, signal, tell) {
  return new Promise((resolve) => {
    const until = performance.now() + ms;
    const show = () => tell(Math.max(1, Math.round((until - performance.now()) / 1000)));
    const every = setInterval(show, 1000);
    const end = () => {
      clearInterval(every);
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
    wake = end;
    show();
  });
}
addEventListener("online", () => wake());
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && wake());

/** `more` is not read out: it changes every second. */
function connection(state, more = "") {
  byId("connection").dataset.state = state;
  setText(byId("connection-words"), STATES[state]);
  setText(byId("retry"), more);
  byId("key-form").hidden = state !== "key";
  showEmpty();
}

// ---- the list of requests

/** @type {Map<string, {id: string, time: number, state: string, input: HTMLInputElement, about: Element}>} */
const requests = new Map(); // newest last
let chosen = location.hash.slice(1); // an id; "" follows the newest
let shown = null; // the Story on screen
let following = new AbortController(); // the connection of `shown`

async function watchAll() {
  const forever = new AbortController().signal;
  for (let failures = 0; ; ) {
    let dropped = false;
    try {
      for await (const event of readEvents("events", forever)) {
        if (event === null) {
          failures = 0;
          connection("watching");
        } else if (event.type === "dropped") {
          dropped = true; // begin again with what is there now
          break;
        } else {
          listEvent(event);
        }
      }
    } catch (error) {
      if (error.status === 401) {
        await askForKey();
        continue;
      }
    }
    if (dropped) continue;
    await wait(Math.min(500 * 2 ** failures, 8000), forever, (left_s) => {
      connection("gone", `; next try in ${left_s} s`);
    });
    failures += 1;
  }
}

function listEvent(event) {
  switch (event.type) {
    case "recent": {
      const known = new Set(event.requests.map((one) => one.id));
      for (const id of [...requests.keys()]) if (!known.has(id)) forget(id);
      for (const one of event.requests.slice(0, LISTED).reverse()) list(one.id, one.time, one.state);
      if (!requests.has(chosen)) {
        chosen = "";
        byId("choices").querySelector("input").checked = true;
      }
      break;
    }
    case "request":
      list(event.request, event.time, "running");
      break;
    case "done":
    case "error":
    case "cancelled":
      if (requests.has(event.request)) list(event.request, 0, event.type);
      break;
    default:
      return;
  }
  follow();
}

function list(id, time, state) {
  let one = requests.get(id);
  if (!one) {
    const label = document.createElement("label");
    label.className = "choice";
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "request", value: id });
    const name = make("span", "choice-name", new Date(time * 1000).toLocaleTimeString());
    const about = make("span", "choice-about", "");
    label.append(input, name, about);
    byId("choices").firstElementChild.after(label);
    one = { id, time, state, input, about };
    requests.set(id, one);
    if (id === chosen) input.checked = true;
    for (const old of [...requests.keys()].slice(0, -LISTED)) if (old !== chosen && old !== shown?.id) forget(old);
  }
  one.state = state;
  one.about.textContent = `${id.slice(-6)}, ${WORDS[state] ?? state}`;
  one.input.parentElement.dataset.state = state;
}

const NOT_STORED = { miss: "not there", down: "no link", slow: "too slow", failed: "failed" };
const WORDS = { running: "running", done: "finished", error: "failed", cancelled: "client left" };

function forget(id) {
  requests.get(id).input.parentElement.remove();
  requests.delete(id);
}

byId("choices").addEventListener("change", (event) => {
  chosen = event.target.value;
  history.replaceState(null, "", chosen ? `#${chosen}` : location.pathname);
  follow();
});

addEventListener("hashchange", () => {
  const one = requests.get(location.hash.slice(1));
  if (!one) return;
  one.input.checked = true;
  chosen = one.id;
  follow();
});

/** Show the request that is to be shown now, if it is not shown yet. */
function follow() {
  const newest = [...requests.keys()].pop();
  const wanted = chosen || newest;
  if (!wanted) return showEmpty();
  if (shown?.id === wanted) return mark();
  if (!chosen && shown && requests.has(shown.id)) {
    const over_ms = shown.endedAt === null ? -Infinity : performance.now() - shown.endedAt;
    if (over_ms < HOLD_MS) { // nobody can read what jumps away
      if (over_ms >= 0) setTimeout(follow, HOLD_MS - over_ms + 1);
      return mark();
    }
  }
  following.abort();
  following = new AbortController();
  shown = new Story(wanted);
  watchOne(shown, following.signal);
  mark();
}

function mark() {
  for (const one of requests.values()) one.input.parentElement.classList.toggle("shown", one.id === shown?.id);
}

async function watchOne(story, signal) {
  for (let tries = 0; !signal.aborted; tries++) {
    const fresh = new Story(story.id);
    try {
      for await (const event of readEvents(`events/${encodeURIComponent(story.id)}`, signal)) {
        if (signal.aborted) return;
        if (event === null) continue;
        tries = 0;
        if (event.type === "dropped") break; // the next connection begins at its beginning
        if (event.seq === 0) Object.assign(fresh, { endedAt: shown.endedAt, drawn: shown.drawn, told: shown.told });
        fresh.apply(event);
        shown = fresh;
        changed();
      }
      if (fresh.last) return;
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 404) {
        shown.lost = true;
        shown.endedAt ??= performance.now();
        return changed();
      }
    }
    await wait(Math.min(500 * 2 ** tries, 8000), signal, () => {});
  }
}

function askForKey() {
  connection("key");
  if (sessionStorage.getItem("key")) byId("key-error").textContent = "The server does not know this key.";
  byId("key").focus();
  return new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem("key", byId("key").value.trim());
      byId("key").value = byId("key-error").textContent = "";
      connection("connecting");
      resolve();
    };
  });
}

// ---- one request

class Story {
  constructor(id) {
    this.id = id;
    this.request = this.started = this.store = this.rest = this.offer = this.progress = this.first = this.last = null;
    this.position = null;
    this.streams = []; // {name, bytes, from_s, ready_s}
    this.tokens = []; // {text, state, from_s, at_s}, in the order of the text
    this.commits = []; // {from_s, at_s, tokens}
    this.verified = null; // {from_s, at_s}
    this.drafted = this.accepted = this.committed = 0;
    this.at_s = 0; // of the newest event
    this.heardAt = performance.now();
    this.endedAt = null;
    this.lost = false;
    this.drawn = 0; // final tokens that a screen reader was told of, or need not be
    this.told = false; // and that it has ended
  }

  /** Seconds since its arrival; of one that has ended, when that was. */
  now_s() {
    if (this.last || this.lost) return this.at_s;
    return this.at_s + (performance.now() - this.heardAt) / 1000;
  }

  apply(event) {
    this.at_s = Math.max(this.at_s, event.at_s);
    this.heardAt = performance.now();
    switch (event.type) {
      case "request": this.request = event; break;
      case "queued": this.position = event.position; break;
      case "started": this.started = event; break;
      case "store": this.store = event; break;
      case "rest": this.rest = event; break;
      case "offer": // a second one, from the prefill server, if the store's did not arrive
        this.offer = event;
        this.progress = null;
        this.streams = event.streams.map((one) => ({ ...one, got: 0, layers: 0, from_s: null, ready_s: null }));
        break;
      case "progress": this.arrived(event); break;
      case "ready": {
        const stream = this.streams[event.stream];
        stream.ready_s = event.at_s;
        stream.from_s ??= this.offer.at_s;
        stream.layers = this.offer.layers;
        break;
      }
      case "draft": this.draft(event); break;
      case "retract": this.retract(event); break;
      case "commit": this.commit(event); break;
      case "first": this.first = event; break;
      default:
        if (LAST.has(event.type)) {
          this.last = event;
          this.endedAt ??= performance.now();
        }
    }
  }

  arrived(event) {
    const before_s = this.progress?.at_s ?? this.offer.at_s;
    this.progress = event;
    this.streams.forEach((stream, index) => {
      stream.got = event.streams[index];
      stream.layers = event.layers[index];
      if (stream.got) stream.from_s ??= before_s;
    });
  }

  /** When what a token needed was there: the token before it, or else the cache. */
  since(stream) {
    const before = this.tokens.findLast((token) => token.state !== "retracted");
    return Math.max(before?.at_s ?? 0, this.commits.at(-1)?.at_s ?? 0, this.rest?.at_s ?? 0, stream?.ready_s ?? this.offer?.at_s ?? 0);
  }

  draft(event) {
    this.drafted += 1;
    const from_s = Math.min(this.since(this.streams[0]), event.at_s);
    this.tokens.push({ text: event.text, state: "draft", was: "draft", from_s, at_s: event.at_s });
  }

  retract(event) {
    let left = event.count;
    for (const token of this.tokens.toReversed()) {
      if (!left) break;
      if (token.state === "draft") {
        token.state = "retracted";
        left -= 1;
      }
    }
  }

  commit(event) {
    const drafts = this.tokens.filter((token) => token.state === "draft");
    const from_s = Math.min(this.since(this.streams.at(-1)), event.at_s);
    for (const token of drafts.slice(0, event.accepted)) token.state = "committed";
    for (const text of event.texts.slice(event.accepted)) {
      this.tokens.push({ text, state: "committed", was: "final", from_s, at_s: event.at_s });
    }
    if (this.drafted && !this.verified) this.verified = { from_s, at_s: event.at_s };
    else this.commits.push({ from_s, at_s: event.at_s });
    this.accepted += event.accepted;
    this.committed += event.tokens.length;
  }

  fromStore() {
    return this.store?.outcome === "hit";
  }

  state() {
    if (this.lost && !this.last) return ["lost", "the server no longer has this request"];
    const ready = this.streams.findLast((one) => one.ready_s !== null);
    switch (this.last?.type) {
      case "done": return ["done", this.last.finish_reason === "length" ? "finished, at the limit of its length" : "finished"];
      case "error": return ["error", "failed"];
      case "cancelled": return ["cancelled", "the client left"];
    }
    if (this.committed) return ["running", "decoding"];
    if (ready && ready === this.streams.at(-1)) {
      return ["running", this.fromStore() && this.store.rest > 1 ? "the stored prefix is here, the rest is being computed" : "the cache is here"];
    }
    if (ready) return ["running", `drafting; the ${this.streams[this.streams.indexOf(ready) + 1].name} stream is on its way`];
    if (this.store && !this.fromStore() && this.store.at_s > (this.offer?.at_s ?? 0)) return ["running", "the prompt is being computed"];
    if (this.offer) return ["running", this.fromStore() ? "the stored prefix is arriving" : "the cache is arriving"];
    if (this.started) return ["running", "the prompt is being computed"];
    if (this.position !== null) return ["running", `waiting for its turn, ${this.position} before it`];
    return ["running", "arrived"];
  }
}

// ---- drawing

let drawing = false;

function changed() {
  if (drawing) return;
  drawing = true;
  setTimeout(() => requestAnimationFrame(draw), DRAW_MS);
}

function draw() {
  drawing = false;
  const story = shown;
  if (!story?.request) {
    if (story?.lost) showEmpty("This request is no longer kept by the server.");
    return;
  }
  showEmpty();
  drawHead(story);
  drawTokens(story);
  drawTime(story);
  drawStreams(story);
  speak(story);
  if (!story.last && !story.lost) changed(); // time goes on
  else follow();
}

/** What is said in the place of a request; without `text` that there is none yet. */
function showEmpty(text) {
  const watching = byId("connection").dataset.state === "watching";
  byId("picture").hidden = !shown?.request;
  byId("empty").hidden = Boolean(shown?.request) || !(watching || text);
  if (text) {
    setText(byId("empty-text"), text);
    byId("example").hidden = true;
  } else if (watching && !shown?.request) {
    lookForModel();
  }
}

let looking = false;

/** Whether the server is ready, and a request that it would answer. */
async function lookForModel() {
  if (looking) return;
  looking = true;
  try {
    const health = await (await fetch("health", { cache: "no-store" })).json();
    if (health.status === "starting") {
      setText(byId("empty-text"), "The server is loading its model.");
      setTimeout(showEmpty, 2000);
    } else {
      setText(byId("empty-text"), "No request yet. The next one will appear here, for example this one:");
      const models = health.status === "ready" ? (await (await fetch("v1/models", { headers: keyHeader() })).json()).data : [];
      const messages = [{ role: "user", content: "Why is the sky blue?" }];
      const body = JSON.stringify({ model: models[0]?.id ?? "MODEL", stream: true, messages });
      setText(byId("example"), `curl -N ${new URL("v1/chat/completions", location.href)} -d '${body}'`);
      byId("example").hidden = false;
    }
  } catch {
    // The connection to /events says what is wrong with the server.
  } finally {
    looking = false;
  }
}

function drawHead(story) {
  const { request } = story;
  const [state, words] = story.state();
  setText(byId("model"), request.model);
  setText(byId("title"), `Request ${story.id.slice(-6)}`);
  byId("title").title = story.id;
  setText(byId("state"), words);
  byId("picture").dataset.state = state;
  byId("problem").hidden = story.last?.type !== "error";
  if (story.last?.type === "error") setText(byId("problem"), story.last.message);
  setText(byId("prompt"), request.prompt);
  const further = story.commits.length ? story.commits.at(-1).at_s - (story.first?.at_s ?? 0) : 0;
  const after = Math.max(story.committed - (story.verified ? story.accepted + 1 : 1), 0);
  const figures = [
    ["First token", story.first && seconds(story.first.ttft_s)],
    ["Prompt", `${request.prompt_tokens} tokens`],
    ...(story.store ? [["From the store", story.fromStore() ? `${story.store.tokens} tokens` : NOT_STORED[story.store.outcome]]] : []),
    ["Final tokens", `${story.committed} of ${request.max_tokens}`],
    ["Drafts accepted", story.drafted && (story.committed || story.last) ? `${story.accepted} of ${story.drafted}` : null],
    ["Decoding", further > 0 && after ? `${(after / further).toPrecision(2)} tokens/s` : null],
    ["Total", story.last ? seconds(story.last.total_s ?? story.at_s) : seconds(story.now_s())],
  ];
  fill(byId("figures"), figures, () => {
    const group = document.createElement("div");
    group.append(make("dt"), make("dd"));
    return group;
  }, (group, [name, value]) => {
    setText(group.firstChild, name);
    setText(group.lastChild, value || "–");
  });
}

function drawTokens(story) {
  const text = byId("text");
  const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  story.tokens.forEach((token, index) => {
    let element = text.children[index];
    const wanted = token.state === "retracted" ? "DEL" : "SPAN";
    if (element?.tagName !== wanted) {
      const made = document.createElement(wanted);
      if (element) element.replaceWith(made);
      else text.append(made);
      element = made;
    }
    setText(element, token.text);
    if (element.className !== token.state) element.className = token.state;
  });
  while (text.children.length > story.tokens.length) text.lastChild.remove();
  text.classList.toggle("open", !story.last && !story.lost);
  if (atEnd) text.scrollTop = text.scrollHeight; // unless the reader has gone back
}

/** What the axis shows: up to a little after the first final tokens, after which nothing new happens. */
function horizon_s(story) {
  const until_s = story.verified?.at_s ?? story.commits[0]?.at_s;
  const wanted_s = until_s === undefined ? story.now_s() * 1.05 : Math.max(until_s, ...story.streams.map((one) => one.ready_s ?? 0)) * 1.3;
  const step_s = niceStep(wanted_s / 4);
  return [Math.max(1, Math.ceil(wanted_s / step_s)) * step_s, step_s];
}

function niceStep(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 0.01)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
}

function drawTime(story) {
  const [until_s, step_s] = horizon_s(story);
  const now_s = story.now_s();
  const rows = [];
  const start_s = story.started?.at_s ?? now_s;
  const offer_s = story.offer?.at_s ?? now_s;
  const prefill = [{ kind: "waits", from_s: 0, to_s: start_s }];
  if (story.started) {
    const computed_s = Math.min(story.offer?.prefill_s ?? offer_s - start_s, offer_s - start_s);
    prefill.push({ kind: "waits", from_s: start_s, to_s: offer_s - computed_s });
    prefill.push({ kind: story.fromStore() ? "waits" : "prefill", from_s: offer_s - computed_s, to_s: offer_s });
  }
  rows.push([story.fromStore() ? "Store" : "Prefill", prefill, offer_s]);
  story.streams.forEach((stream, index) => {
    const bars = stream.from_s === null ? [] : [{ kind: `stream-${index}`, from_s: stream.from_s, to_s: stream.ready_s ?? now_s }];
    rows.push([capital(stream.name), bars, stream.ready_s]);
  });
  if (!story.streams.length) rows.push(["Anchor", [], null], ["Residual", [], null]);
  if (story.rest) rows.push(["Rest", [{ kind: "prefill", from_s: story.streams.at(-1).ready_s, to_s: story.rest.at_s }], story.rest.at_s]);
  const drafts = story.tokens.filter((token) => token.was === "draft");
  rows.push(["Drafts", drafts.map((token) => ({ kind: `token ${token.state}`, from_s: token.from_s, to_s: token.at_s })), drafts.at(-1)?.at_s]);
  const verified = story.verified ? [{ kind: "verification", from_s: story.verified.from_s, to_s: story.verified.at_s }] : [];
  const whole_s = story.streams.at(-1)?.ready_s;
  if (!story.verified && story.drafted && whole_s && !story.last) verified.push({ kind: "verification", from_s: story.since(story.streams.at(-1)), to_s: now_s });
  rows.push(["Verification", verified, story.verified?.at_s]);
  rows.push(["Decoding", story.commits.map((one) => ({ kind: "token committed", from_s: one.from_s, to_s: one.at_s })), story.commits.at(-1)?.at_s]);

  byId("time").style.setProperty("--step", `${(100 * step_s) / until_s}%`);
  fill(byId("time"), rows, () => {
    const row = make("div", "row");
    const track = make("div", "track");
    track.setAttribute("role", "img");
    row.append(make("span", "row-name"), track, make("span", "row-value"));
    return row;
  }, (row, [name, bars, end_s]) => {
    const [label, track, value] = row.children;
    const visible = bars.filter((bar) => bar.from_s < until_s && bar.to_s > bar.from_s);
    setText(label, name);
    setText(value, end_s ? seconds(end_s) : "");
    const words = bars.length ? `${name}: from ${seconds(bars[0].from_s)} to ${seconds(bars.at(-1).to_s)}` : `${name}: not yet`;
    if (track.getAttribute("aria-label") !== words) track.setAttribute("aria-label", words);
    track.classList.toggle("more", bars.some((bar) => bar.to_s > until_s));
    fill(track, visible, () => make("i"), (element, bar) => {
      const from = bar.from_s / until_s;
      if (element.className !== bar.kind) element.className = bar.kind;
      place(element, from, Math.min(bar.to_s / until_s, 1) - from);
    });
  });
  const marks = Array.from({ length: Math.round(until_s / step_s) + 1 }, (_, index) => index * step_s);
  fill(byId("axis"), marks, () => make("span"), (element, at_s) => {
    setText(element, Number(at_s.toPrecision(3)) + (at_s ? "" : " s"));
    place(element, at_s / until_s);
  });
}

function drawStreams(story) {
  fill(byId("streams"), story.streams, () => meter(), (element, stream, index) => {
    const done = stream.ready_s !== null;
    const words = `${bytes(stream.got)} of ${bytes(stream.bytes)}`;
    drawMeter(element, capital(stream.name), done ? 1 : Math.min(stream.got / (stream.bytes || 1), 1), done ? bytes(stream.got) : words);
    element.dataset.stream = index;
    element.classList.toggle("ready", done);
    const layers = element.children[2];
    const words2 = `${stream.layers} of ${story.offer.layers} layers`;
    layers.setAttribute("aria-label", words2);
    fill(layers, Array.from({ length: story.offer.layers }, (_, layer) => layer < stream.layers), () => make("i"), (cell, full) => {
      cell.classList.toggle("full", full);
    });
  });
  const lanes = story.offer ? (story.progress?.lanes ?? new Array(story.offer.lanes).fill(0)) : [];
  const share = story.streams.reduce((sum, one) => sum + one.bytes, 0) / (lanes.length || 1);
  const scale = Math.max(share, ...lanes, 1);
  fill(byId("lanes"), lanes, () => meter(), (element, got, index) => drawMeter(element, `Lane ${index}`, got / scale, bytes(got)));
}

function meter() {
  const element = make("div", "meter");
  const head = make("p", "meter-head");
  head.append(make("span"), make("span"));
  const bar = make("div", "bar");
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", "100");
  bar.append(make("i"));
  const layers = make("div", "layers");
  layers.setAttribute("role", "img");
  element.append(head, bar, layers);
  return element;
}

function drawMeter(element, name, part, words) {
  const [head, bar] = element.children;
  setText(head.firstChild, name);
  setText(head.lastChild, words);
  bar.setAttribute("aria-label", name);
  bar.setAttribute("aria-valuenow", String(Math.round(100 * part)));
  bar.setAttribute("aria-valuetext", words);
  place(bar.firstChild, 0, part);
}

// ---- for screen readers: final text in sentences, now and then

let spokenAt = 0;
let spokenStory = "";

function speak(story) {
  const final = story.tokens.filter((token) => token.state === "committed");
  if (spokenStory !== story.id) {
    spokenStory = story.id;
    story.drawn = final.length; // what was there before can be read on the page
    byId("spoken").textContent = `Request ${story.id.slice(-6)}: ${story.state()[1]}.`;
    spokenAt = performance.now();
    return;
  }
  const fresh = final.slice(story.drawn).map((token) => token.text).join("");
  const whole = story.last || story.lost;
  if (whole ? story.told : !fresh || performance.now() - spokenAt < SPEAK_MS || !/[.!?:\n]\s*$|^.{200}/s.test(fresh)) return;
  story.told = Boolean(whole);
  story.drawn = final.length;
  spokenAt = performance.now();
  byId("spoken").textContent = whole ? `${fresh} Request ${story.state()[1]}, ${story.committed} tokens.` : fresh;
}

// ---- small things

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** As many children as there are values, each updated from its own; what is there already is kept. */
function fill(parent, values, create, update) {
  while (parent.children.length > values.length) parent.lastElementChild.remove();
  while (parent.children.length < values.length) parent.append(create());
  values.forEach((value, index) => update(parent.children[index], value, index));
}

function place(element, from, size) {
  const left = `${(100 * from).toFixed(2)}%`;
  if (element.style.left !== left) element.style.left = left;
  if (size === undefined) return;
  const width = `${(100 * size).toFixed(2)}%`;
  if (element.style.width !== width) element.style.width = width;
}

function seconds(value) {
  return value < 0.1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(Math.max(value, 1)) / 3), 4);
  return `${power ? (value / 1000 ** power).toPrecision(3) : value} ${units[power]}`;
}

function capital(word) {
  return word.charAt(0).toUpperCase() + word.slice(1);
}

watchAll();
