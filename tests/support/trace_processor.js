// node trace_processor.js FOLDER: requests of Perfetto's trace processor on standard input, its replies on standard output.
// FOLDER has its build for browsers, which asks a worker for everything: the few things that it asks for stand here.
"use strict";
const fs = require("node:fs"), path = require("node:path"), vm = require("node:vm");
const folder = process.argv[2];
Object.assign(globalThis, {
  self: globalThis,
  process: undefined, // it refuses to run where there is one
  console: { ...console, log: () => {}, warn: () => {} },
  location: { href: `file://${folder}/engine_bundle.js` },
  WorkerGlobalScope: class {},
  XMLHttpRequest: class {
    open(method, address) { this.file = path.join(folder, path.basename(address)); }
    send() { [this.response, this.status] = [fs.readFileSync(this.file), 200]; }
  },
});
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
const port = { postMessage: (reply) => fs.writeSync(1, reply) };
self.onmessage({ data: port });
setTimeout(() => port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) }));
