// What Microsoft's JavaScript SDK, unmodified, does with the emulator: one function a step.
//
// Run: node steps.mjs STEP, with the connection string and the folder of the SDK in the environment.
// A line "advance SECONDS" on standard output asks whoever started this to move the emulator's
// clock, "fault NAME" to let something go wrong; each waits for a line back. A step that comes to
// its end prints "done".

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";

const sdk = createRequire(path.join(process.env.SDK_FOLDER, "package.json"));
const { ServiceBusClient } = sdk("@azure/service-bus");
const wait = { maxWaitTimeInMs: 10_000 };
const briefly = { maxWaitTimeInMs: 500 };
const answers = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();

function client(options) {
  return new ServiceBusClient(process.env.CONNECTION_STRING, options);
}

async function advance(seconds) {
  console.log(`advance ${seconds}`);
  await answers.next();
}

async function fault(name) {
  console.log(`fault ${name}`);
  await answers.next();
}

async function using(work, options) {
  const bus = client(options);
  try {
    await work(bus);
  } finally {
    await bus.close();
  }
}

async function send(bus, name, ...messages) {
  const sender = bus.createSender(name);
  for (const message of messages) {
    await sender.sendMessages(message);
  }
  await sender.close();
}

async function receive(receiver, count) {
  const got = [];
  while (got.length < count) {
    const more = await receiver.receiveMessages(count - got.length, wait);
    assert.ok(more.length > 0, `${got.length} of ${count} came`);
    got.push(...more);
  }
  return got;
}

async function nothing(receiver) {
  assert.deepEqual(await receiver.receiveMessages(1, briefly), []);
}

// The SDK gives up if a connection ends while it is opening it, or while nothing has come from it
// yet, and where the cut reaches it as a reset: an application tries again.
async function again(action) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await action();
    } catch (error) {
      const cut = /Failed to connect|error .* on the AMQP connection|read ECONNRESET/;
      if (attempt === 5 || !cut.test(error.message)) {
        throw error;
      }
    }
  }
}

async function raises(code, action) {
  await assert.rejects(action, (error) => {
    assert.equal(error.code, code, `${error.code}: ${error.message}`);
    return true;
  });
}

const bodies = (messages) => messages.map((message) => message.body);
const once = { retryOptions: { maxRetries: 0, timeoutInMs: 10_000 } };

const steps = {
  async single() {
    await using(async (bus) => {
      await send(bus, "plain", {
        body: { nested: ["ä", 1] },
        messageId: "id-1",
        subject: "created",
        contentType: "application/json",
        correlationId: "c-1",
        timeToLive: 300_000,
        applicationProperties: { text: "ä", number: 7, truth: true },
      });
      const receiver = bus.createReceiver("plain");
      const [got] = await receive(receiver, 1);
      assert.deepEqual(got.body, { nested: ["ä", 1] });
      assert.deepEqual([got.messageId, got.subject], ["id-1", "created"]);
      assert.deepEqual([got.contentType, got.correlationId], ["application/json", "c-1"]);
      assert.equal(got.timeToLive, 300_000);
      assert.deepEqual(got.applicationProperties, { text: "ä", number: 7, truth: true });
      assert.equal(got.sequenceNumber.toString(), "1");
      assert.ok(Math.abs(Date.now() - got.enqueuedTimeUtc.getTime()) < 60_000);
      await receiver.completeMessage(got);
      await nothing(receiver);
    });
  },

  async batch() {
    await using(async (bus) => {
      const sender = bus.createSender("plain");
      const envelope = await sender.createMessageBatch();
      assert.equal(envelope.maxSizeInBytes, 262_144);
      const body = Buffer.alloc(1000, "x");
      while (envelope.tryAddMessage({ body, messageId: String(envelope.count) }));
      assert.ok(envelope.count > 200, String(envelope.count));
      await sender.sendMessages(envelope);
      await sender.sendMessages([0, 1, 2, 3, 4].map((i) => ({ body: `list-${i}` })));
      const receiver = bus.createReceiver("plain");
      const got = await receive(receiver, envelope.count + 5);
      const ids = got.slice(0, envelope.count).map((message) => message.messageId);
      assert.deepEqual(ids, [...Array(envelope.count).keys()].map(String));
      assert.deepEqual(bodies(got.slice(envelope.count)), [0, 1, 2, 3, 4].map((i) => `list-${i}`));
      for (const message of got) {
        await receiver.completeMessage(message);
      }
      console.log(`sent ${envelope.count + 5}`);
    });
  },

  async named_session() {
    await using(async (bus) => {
      for (const i of [0, 1, 2]) {
        await send(bus, "sessions", ...["a", "b"].map((s) => ({ body: s + i, sessionId: s })));
      }
      const receiver = await bus.acceptSession("sessions", "b");
      assert.equal(receiver.sessionId, "b");
      const left = receiver.sessionLockedUntilUtc.getTime() - Date.now();
      assert.ok(left > 0 && left <= 61_000, String(left));
      const got = await receive(receiver, 3);
      assert.deepEqual(bodies(got), ["b0", "b1", "b2"]);
      for (const message of got) {
        await receiver.completeMessage(message);
      }
      await nothing(receiver);
      await using(async (other) => {
        await raises("SessionCannotBeLocked", () => other.acceptSession("sessions", "b"));
      }, once);
      await receiver.close();
    });
  },

  async next_session() {
    await using(async (bus) => {
      await send(bus, "sessions", { body: "1", sessionId: "first" });
      await send(bus, "sessions", { body: "2", sessionId: "second" });
      const seen = [];
      for (let i = 0; i < 2; i++) {
        const receiver = await bus.acceptNextSession("sessions");
        seen.push(receiver.sessionId);
        const [message] = await receive(receiver, 1);
        await receiver.completeMessage(message);
        await receiver.close();
      }
      assert.deepEqual(seen, ["first", "second"]);
    });
    await using(async (bus) => {
      await raises("ServiceTimeout", () => bus.acceptNextSession("sessions"));
    }, { retryOptions: { maxRetries: 0, timeoutInMs: 2_000 } });
  },

  async abandon() {
    await using(async (bus) => {
      await send(bus, "plain", { body: "poison", messageId: "p" });
      const receiver = bus.createReceiver("plain");
      for (let attempt = 0; attempt < 3; attempt++) {
        const [message] = await receive(receiver, 1);
        assert.equal(message.deliveryCount, attempt);
        await receiver.abandonMessage(message);
      }
      await nothing(receiver);
      const letters = bus.createReceiver("plain", { subQueueType: "deadLetter" });
      const [letter] = await receive(letters, 1);
      assert.deepEqual([letter.messageId, letter.body], ["p", "poison"]);
      assert.equal(letter.deadLetterReason, "MaxDeliveryCountExceeded");
      assert.match(letter.deadLetterErrorDescription, /3 delivery attempts/);
      await letters.completeMessage(letter);
    });
  },

  async dead_letter() {
    await using(async (bus) => {
      await send(bus, "plain", { body: "bad", applicationProperties: { kept: "yes" } });
      const receiver = bus.createReceiver("plain");
      const [message] = await receive(receiver, 1);
      await receiver.deadLetterMessage(message, {
        deadLetterReason: "no good",
        deadLetterErrorDescription: "at all",
      });
      await nothing(receiver);
      const letters = bus.createReceiver("plain", { subQueueType: "deadLetter" });
      const [letter] = await receive(letters, 1);
      assert.equal(letter.deadLetterReason, "no good");
      assert.equal(letter.deadLetterErrorDescription, "at all");
      assert.equal(letter.applicationProperties.kept, "yes");
      await letters.completeMessage(letter);
    });
  },

  async defer() {
    await using(async (bus) => {
      await send(bus, "plain", { body: "later" }, { body: "now" });
      const receiver = bus.createReceiver("plain");
      const [first] = await receive(receiver, 1);
      await receiver.deferMessage(first);
      const [second] = await receive(receiver, 1);
      assert.equal(second.body, "now");
      await receiver.completeMessage(second);
      await nothing(receiver);
      const [deferred] = await receiver.receiveDeferredMessages(first.sequenceNumber);
      assert.equal(deferred.body, "later");
      await receiver.completeMessage(deferred);
      await raises("MessageNotFound", () => receiver.receiveDeferredMessages(first.sequenceNumber));
    }, once);
  },

  async renew() {
    await using(async (bus) => {
      await send(bus, "plain", { body: "held" });
      const receiver = bus.createReceiver("plain", { maxAutoLockRenewalDurationInMs: 0 });
      const [message] = await receive(receiver, 1);
      const before = message.lockedUntilUtc;
      await advance(20);
      assert.ok((await receiver.renewMessageLock(message)) > before);
      await advance(20);
      await receiver.completeMessage(message);
      await send(bus, "plain", { body: "lost" });
      const [lost] = await receive(receiver, 1);
      await advance(31);
      await raises("MessageLockLost", () => receiver.renewMessageLock(lost));
      await raises("MessageLockLost", () => receiver.completeMessage(lost));
      const [again] = await receive(receiver, 1);
      assert.deepEqual([again.body, again.deliveryCount], ["lost", 1]);
      await receiver.completeMessage(again);
    }, once);
  },

  async renew_session() {
    await using(async (bus) => {
      await send(bus, "sessions", { body: "held", sessionId: "s" });
      const receiver = await bus.acceptSession("sessions", "s", {
        maxAutoLockRenewalDurationInMs: 0,
      });
      const before = receiver.sessionLockedUntilUtc;
      await advance(40);
      assert.ok((await receiver.renewSessionLock()) > before);
      await advance(40);
      const [message] = await receive(receiver, 1);
      await receiver.completeMessage(message);
      await advance(61);
      await raises("SessionLockLost", () => receiver.renewSessionLock());
      await receiver.close();
    }, once);
  },

  async schedule() {
    await using(async (bus) => {
      const sender = bus.createSender("plain");
      const due = new Date(Date.now() + 60_000);
      const numbers = await sender.scheduleMessages(
        [0, 1, 2].map((i) => ({ body: `s${i}` })),
        due,
      );
      assert.deepEqual(numbers.map(String), ["1", "2", "3"]);
      await sender.cancelScheduledMessages(numbers[1]);
      await raises("MessageNotFound", () => sender.cancelScheduledMessages(numbers[1]));
      await sender.sendMessages({ body: "by annotation", scheduledEnqueueTimeUtc: due });
      const receiver = bus.createReceiver("plain");
      await nothing(receiver);
      assert.equal((await receiver.peekMessages(10)).length, 3);
      await advance(61);
      assert.deepEqual(bodies(await receive(receiver, 3)).sort(), ["by annotation", "s0", "s2"]);
    }, once);
  },

  async peek() {
    await using(async (bus) => {
      await send(bus, "plain", ...[0, 1, 2, 3, 4].map((i) => ({ body: String(i) })));
      const receiver = bus.createReceiver("plain");
      assert.deepEqual(bodies(await receiver.peekMessages(3)), ["0", "1", "2"]);
      assert.deepEqual(bodies(await receiver.peekMessages(10)), ["3", "4"]);
      assert.deepEqual(await receiver.peekMessages(1), []);
      assert.equal((await receive(receiver, 5)).length, 5);
    });
  },

  async session_state() {
    await using(async (bus) => {
      const first = await bus.acceptSession("sessions", "s");
      assert.equal(await first.getSessionState(), null);
      await first.setSessionState("page 7");
      await first.close();
      const second = await bus.acceptSession("sessions", "s");
      assert.equal(String(await second.getSessionState()), "page 7");
      await second.setSessionState(null);
      assert.equal(await second.getSessionState(), null);
      await second.close();
    });
  },

  async duplicates() {
    await using(async (bus) => {
      const message = (id) => ({ body: id, messageId: id });
      await send(bus, "detecting", ...["a", "b", "a"].map(message));
      await send(bus, "detecting", ["b", "c", "c"].map(message));
      await advance(19);
      await send(bus, "detecting", message("a"));
      await advance(2);
      await send(bus, "detecting", message("a"));
      const receiver = bus.createReceiver("detecting");
      assert.deepEqual(bodies(await receive(receiver, 4)), ["a", "b", "c", "a"]);
      await nothing(receiver);
    });
  },

  async concurrent_sessions() {
    const [sessions, each] = [8, 10];
    const names = [...Array(sessions).keys()].map((s) => `s${s}`);
    const seen = {};
    const held = [];
    await using(async (bus) => {
      for (let i = 0; i < each; i++) {
        await send(bus, "sessions", names.map((sessionId) => ({ body: i, sessionId })));
      }
      const work = async () => {
        for (let i = 0; i < 2; i++) {
          const receiver = await bus.acceptNextSession("sessions");
          held.push(receiver.sessionId);
          for (const message of await receive(receiver, each)) {
            (seen[receiver.sessionId] ??= []).push(message.body);
            await receiver.completeMessage(message);
          }
          await receiver.close();
        }
      };
      await Promise.all([work(), work(), work(), work()]);
    });
    const order = [...Array(each).keys()];
    assert.deepEqual(seen, Object.fromEntries(Object.keys(seen).map((name) => [name, order])));
    assert.deepEqual(held.sort(), names);
  },

  async receive_and_delete() {
    await using(async (bus) => {
      await send(bus, "plain", ...[0, 1, 2].map((i) => ({ body: i })));
      const receiver = bus.createReceiver("plain", { receiveMode: "receiveAndDelete" });
      assert.deepEqual(bodies(await receive(receiver, 3)), [0, 1, 2]);
      await nothing(receiver);
    });
  },

  async topics() {
    await using(async (bus) => {
      await send(bus, "events", [0, 1].map((i) => ({ body: i, sessionId: "s" })));
      const receiver = bus.createReceiver("events", "all");
      const got = await receive(receiver, 2);
      assert.deepEqual(bodies(got), [0, 1]);
      await receiver.completeMessage(got[0]);
      await receiver.deadLetterMessage(got[1], { deadLetterReason: "why not" });
      const letters = bus.createReceiver("events", "all", { subQueueType: "deadLetter" });
      assert.equal((await receive(letters, 1))[0].deadLetterReason, "why not");
      const session = await bus.acceptSession("EVENTS", "By-Session", "s");
      assert.deepEqual(bodies(await receive(session, 2)), [0, 1]);
      await session.close();
    });
  },

  async time_to_live() {
    await using(async (bus) => {
      const timeToLive = 30_000;
      await send(bus, "plain", { body: "gone", timeToLive });
      await send(bus, "burying", { body: "buried", timeToLive }, { body: "stays" });
      await advance(31);
      await nothing(bus.createReceiver("plain"));
      assert.deepEqual(bodies(await receive(bus.createReceiver("burying"), 1)), ["stays"]);
      const letters = bus.createReceiver("burying", { subQueueType: "deadLetter" });
      const [letter] = await receive(letters, 1);
      assert.deepEqual([letter.body, letter.deadLetterReason], ["buried", "TTLExpiredException"]);
    });
  },

  async limits() {
    await using(async (bus) => {
      const large = { body: Buffer.alloc(300_000, "x") };
      await raises("MessageSizeExceeded", () => send(bus, "plain", large));
      await send(bus, "large", large);
      const sender = bus.createSender("large");
      assert.equal((await sender.createMessageBatch()).maxSizeInBytes, 1024 * 1024);
      await assert.rejects(() => send(bus, "sessions", { body: "no session" }), /SessionId/);
      await raises("MessagingEntityNotFound", () => send(bus, "missing", { body: "nowhere" }));
    }, once);
  },

  async wrong_key() {
    const wrong = process.env.CONNECTION_STRING.replace("SharedAccessKey=", "SharedAccessKey=not");
    const bus = new ServiceBusClient(wrong, once);
    await raises("UnauthorizedAccess", () => send(bus, "plain", { body: "x" }));
    await bus.close();
  },

  async busy() {
    const options = { retryOptions: { maxRetries: 5, retryDelayInMs: 10 } };
    await using((bus) => send(bus, "plain", { body: "persistent" }), options);
  },

  async disabled() {
    await using(async (bus) => {
      await raises("MessagingEntityDisabled", () => send(bus, "plain", { body: "x" }));
    }, once);
  },

  async recovers() {
    await using(async (bus) => {
      const sender = bus.createSender("plain");
      await sender.sendMessages({ body: "0" });
      for (const name of ["detach", "expire", "drop", "close"]) {
        await fault(name);
        await again(() => sender.sendMessages({ body: name }));
      }
      const receiver = bus.createReceiver("plain");
      for (const name of ["", "detach", "drop"]) {
        if (name) {
          await fault(name);
        }
        const [message] = await again(() => receive(receiver, 1));
        await receiver.completeMessage(message);
      }
    }, { retryOptions: { maxRetries: 5, retryDelayInMs: 50, timeoutInMs: 2_000 } });
  },

  async full() {
    await using(async (bus) => {
      await raises("QuotaExceeded", () => send(bus, "plain", { body: "x" }));
    }, once);
  },
};

await steps[process.argv[2]]();
console.log("done");
process.exit(0);
