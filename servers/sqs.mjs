// An SQS server on loopback: npm's fauxqs as a library, for its own command listens on every interface.
// Argument: its package folder. Prints its port in one line, once it listens. Ends with its starter.
import { register } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const load = (file) => import(pathToFileURL(join(process.argv[2], "dist", file)));

// fauxqs loads node:sqlite, which Node 20 lacks, for persistence, which is not used here.
const nothing = "data:text/javascript,export class DatabaseSync {}";
const hook = `export const resolve = (name, context, next) =>
  name === "node:sqlite" ? { url: "${nothing}", shortCircuit: true } : next(name, context);`;
register(`data:text/javascript,${encodeURIComponent(hook)}`);

const { buildApp } = await load("app.js");
const { SqsQueue, SqsStore } = await load("sqs/sqsStore.js");

// Every receive looks at every message in flight, and shifts an array, which moves all that waits. Without the two
// replacements below, 100,000 messages were received in 93 s in place of 19. Time-outs are whole seconds.
const processTimers = SqsQueue.prototype.processTimers;
SqsQueue.prototype.processTimers = function () {
  const now = Date.now();
  if (now - (this.timersProcessed ?? 0) < 100) return;
  this.timersProcessed = now;
  processTimers.call(this);
};

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
    if (this.#head === 10_000) {
      this.#items = this.#items.slice(this.#head);
      this.#head = 0;
    }
    return this.#items[this.#head++];
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

// By itself the server counts a message whose lease is over as in flight until somebody asks for messages.
// A sensor looks at the backlog first, and would wait for ever.
setInterval(() => queues.forEach((queue) => queue.processTimers()), 250).unref();

const app = buildApp({ logger: false, stores: { sqsStore: new Store() } });
await app.listen({ host: "127.0.0.1", port: 0 });
console.log(app.server.address().port);
process.stdin.on("end", () => process.exit(0)).resume(); // a pipe from the starter
