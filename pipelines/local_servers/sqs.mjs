// An SQS server on loopback: npm's fauxqs as a library, for its own command listens on every interface.
// Arguments: its package folder, the port (0 for a free one), "stay" to outlive whoever started it.
// Says its port in one line, once it listens.
import { register } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, port, stay] = process.argv.slice(2);
const load = (file) => import(pathToFileURL(join(folder, "dist", file)));

// fauxqs loads node:sqlite, which Node 20 lacks, for persistence that nobody asks for here.
const nothing = "data:text/javascript,export class DatabaseSync {}";
const hook = `export const resolve = (name, context, next) =>
  name === "node:sqlite" ? { url: "${nothing}", shortCircuit: true } : next(name, context);`;
register(`data:text/javascript,${encodeURIComponent(hook)}`);

const { buildApp } = await load("app.js");
const { SqsQueue, SqsStore } = await load("sqs/sqsStore.js");

// Every receive looks at every message in flight: with 100,000 of them that halves the rate. Ten times a
// second is often enough for time-outs in seconds.
const processTimers = SqsQueue.prototype.processTimers;
SqsQueue.prototype.processTimers = function () {
  const now = Date.now();
  if (now - (this.timersProcessed ?? 0) < 100) return;
  this.timersProcessed = now;
  processTimers.call(this);
};

// What waits is an array that is shifted, which moves all of it: 10 s of a drain of 100,000.
class Line {
  #items = [];
  #head = 0;
  get length() {
    return this.#items.length - this.#head;
  }
  push(item) {
    this.#items.push(item);
  }
  shift() {
    const item = this.#items[this.#head];
    if (item === undefined) return undefined;
    this.#items[this.#head++] = undefined;
    if (this.#head >= 10_000 && this.#head * 2 >= this.#items.length) {
      this.#items = this.#items.slice(this.#head);
      this.#head = 0;
    }
    return item;
  }
  *[Symbol.iterator]() {
    yield* this.#items.slice(this.#head);
  }
}

const queues = new Set();
class Store extends SqsStore {
  host = ""; // queues get the address they were asked for by, not a name that must be resolved
  createQueue(...given) {
    const queue = super.createQueue(...given);
    queue.messages = new Line();
    queues.add(queue);
    return queue;
  }
}

// Left to itself, a message whose lease is over counts as in flight until somebody asks for messages: whoever
// looks at the backlog first, as our sensor does, would wait for ever.
setInterval(() => queues.forEach((queue) => queue.processTimers()), 250).unref();

const app = buildApp({ logger: false, stores: { sqsStore: new Store() } });
await app.listen({ host: "127.0.0.1", port: Number(port) });
console.log(app.server.address().port);

// Standard input is a pipe from whoever started it: it ends with them, however they end.
if (stay !== "stay") process.stdin.on("end", () => process.exit(0)).resume();
