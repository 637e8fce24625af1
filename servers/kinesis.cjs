// A Kinesis server on loopback: npm's kinesis-local, whose own command listens on every interface.
// Arguments: its package folder, a port for HTTPS and a port for HTTP. Prints the latter, once it listens. Ends with its
// starter.
const net = require("node:net");
const path = require("node:path");

const [home, tlsPort, port] = process.argv.slice(2);
Object.assign(process.env, {
  KINESIS_MOCK_TLS_PORT: tlsPort,
  KINESIS_MOCK_PLAIN_PORT: port,
  KINESIS_MOCK_CERT_PATH: path.join(home, "server.json"),
  LOG_LEVEL: "ERROR",
  SHARD_LIMIT: "10000",
});
for (const change of ["CREATE_STREAM", "DELETE_STREAM", "MERGE_SHARDS", "SPLIT_SHARD", "UPDATE_SHARD_COUNT"]) {
  process.env[`${change}_DURATION`] = "20ms";
}

const print = process.stdout.write.bind(process.stdout);
process.stdout.write = (text, ...rest) => process.stderr.write(text, ...rest); // the fixture reads the port only
const complain = process.stderr.write.bind(process.stderr);
process.stderr.write = (text, ...rest) => // on a busy machine, the server warns of its delays every second
  String(text).includes("Your app's responsiveness") || complain(text, ...rest);

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (given, ...rest) {
  if (String(given) === port) this.once("listening", () => print(`${port}\n`));
  return listen.call(this, given, "127.0.0.1", rest.at(-1)); // the last argument is the callback
};

require(path.join(home, "main.js"));
process.stdin.on("end", () => process.exit(0)).resume(); // a pipe from the starter
