"""What Microsoft's Python SDK, unmodified, does with the emulator: one function a step.

Run: steps.py STEP, with the connection string in the environment. A line "advance SECONDS" on
standard output asks whoever started this to move the emulator's clock, "fault NAME" to let
something go wrong; each waits for a line back. A step that comes to its end prints "done".
"""

import datetime
import logging
import os
import sys
import threading
import uuid

from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceiveMode,
    ServiceBusSubQueue,
)
from azure.servicebus import exceptions

CONNECTION = os.environ["CONNECTION_STRING"]
WAIT = 10


# For whoever looks for the reason of a failure.
LOGGED = "SDK_LOG" in os.environ
if LOGGED:
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(message)s")


def client(**options):
    return ServiceBusClient.from_connection_string(CONNECTION, logging_enable=LOGGED, **options)


def advance(seconds):
    print("advance", seconds, flush=True)
    sys.stdin.readline()


def fault(name):
    print("fault", name, flush=True)
    sys.stdin.readline()


def body(message):
    return b"".join(message.body)


def send(bus, name, *messages):
    with bus.get_queue_sender(name) as sender:
        for message in messages:
            sender.send_messages(message)


def receive(receiver, count):
    """Exactly so many messages, or a failure once nothing more comes."""
    got = []
    while len(got) < count:
        more = receiver.receive_messages(max_message_count=count - len(got), max_wait_time=WAIT)
        assert more, f"{len(got)} of {count} came"
        got.extend(more)
    return got


def nothing(receiver):
    assert receiver.receive_messages(max_message_count=1, max_wait_time=0.5) == []


def raises(kind, action):
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def single():
    message = ServiceBusMessage(
        b"\x00\xffbody",
        message_id="id-1",
        subject="created",
        content_type="application/json",
        correlation_id="c-1",
        to="somebody",
        reply_to="me",
        time_to_live=datetime.timedelta(minutes=5),
        application_properties={"text": "ä", "number": 7, "truth": True, "fraction": 0.5},
    )
    with client() as bus:
        send(bus, "plain", message)
        with bus.get_queue_receiver("plain") as receiver:
            (got,) = receive(receiver, 1)
            assert body(got) == b"\x00\xffbody"
            assert (got.message_id, got.subject) == ("id-1", "created")
            assert (got.content_type, got.correlation_id) == ("application/json", "c-1")
            assert (got.to, got.reply_to) == ("somebody", "me")
            assert got.time_to_live == datetime.timedelta(minutes=5)
            properties = {
                key.decode(): value.decode() if isinstance(value, bytes) else value
                for key, value in got.application_properties.items()
            }
            assert properties == {"text": "ä", "number": 7, "truth": True, "fraction": 0.5}
            assert got.sequence_number == 1 and got.delivery_count == 0
            assert isinstance(got.lock_token, uuid.UUID)
            age = datetime.datetime.now(datetime.timezone.utc) - got.enqueued_time_utc
            assert abs(age.total_seconds()) < 60, age
            receiver.complete_message(got)
            nothing(receiver)


def batch():
    with client() as bus:
        with bus.get_queue_sender("plain") as sender:
            envelope = sender.create_message_batch()
            assert envelope.max_size_in_bytes == 262144, envelope.max_size_in_bytes
            count = 0
            while True:
                try:
                    envelope.add_message(ServiceBusMessage(b"x" * 1000, message_id=str(count)))
                    count += 1
                except exceptions.MessageSizeExceededError:
                    break
            assert count > 200, count
            sender.send_messages(envelope)
            sender.send_messages([ServiceBusMessage(f"list-{i}") for i in range(5)])
        with bus.get_queue_receiver("plain", prefetch_count=50) as receiver:
            got = receive(receiver, count + 5)
            ids = [message.message_id for message in got[:count]]
            assert ids == [str(i) for i in range(count)], ids
            assert [body(message) for message in got[count:]] == [b"list-%d" % i for i in range(5)]
            for message in got:
                receiver.complete_message(message)
    print("sent", count + 5, flush=True)


def named_session():
    with client() as bus:
        messages = [ServiceBusMessage(f"{s}{i}", session_id=s) for i in range(3) for s in "ab"]
        send(bus, "sessions", *messages)
        with bus.get_queue_receiver("sessions", session_id="b") as receiver:
            assert receiver.session.session_id == "b"
            until = receiver.session.locked_until_utc
            left = until - datetime.datetime.now(datetime.timezone.utc)
            assert 0 < left.total_seconds() <= 61, left
            got = receive(receiver, 3)
            assert [body(message) for message in got] == [b"b0", b"b1", b"b2"]
            assert all(message.session_id == "b" for message in got)
            for message in got:
                receiver.complete_message(message)
            nothing(receiver)
            # The session is held: nobody else can have it.
            with client(retry_total=0) as other:
                taken = other.get_queue_receiver("sessions", session_id="b")
                raises(exceptions.SessionCannotBeLockedError, taken.receive_messages)
                taken.close()


def next_session():
    with client() as bus:
        send(bus, "sessions", ServiceBusMessage("1", session_id="first"))
        send(bus, "sessions", ServiceBusMessage("2", session_id="second"))
        seen = []
        for _ in range(2):
            with bus.get_queue_receiver("sessions", session_id=NEXT_AVAILABLE_SESSION) as receiver:
                seen.append(receiver.session.session_id)
                (message,) = receive(receiver, 1)
                receiver.complete_message(message)
        assert seen == ["first", "second"], seen
        empty = bus.get_queue_receiver(
            "sessions", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=1
        )
        raises(exceptions.OperationTimeoutError, lambda: empty.receive_messages())
        empty.close()


def abandon():
    with client() as bus:
        send(bus, "plain", ServiceBusMessage("poison", message_id="p"))
        with bus.get_queue_receiver("plain") as receiver:
            for attempt in range(3):
                (message,) = receive(receiver, 1)
                assert message.delivery_count == attempt, message.delivery_count
                receiver.abandon_message(message)
            nothing(receiver)
        letters = bus.get_queue_receiver("plain", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
        with letters:
            (letter,) = receive(letters, 1)
            assert letter.message_id == "p" and body(letter) == b"poison"
            assert letter.dead_letter_reason == "MaxDeliveryCountExceeded"
            assert "3 delivery attempts" in letter.dead_letter_error_description
            letters.complete_message(letter)


def dead_letter():
    with client() as bus:
        send(bus, "plain", ServiceBusMessage("bad", application_properties={"kept": "yes"}))
        with bus.get_queue_receiver("plain") as receiver:
            (message,) = receive(receiver, 1)
            receiver.dead_letter_message(message, reason="no good", error_description="at all")
            nothing(receiver)
        letters = bus.get_queue_receiver("plain", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
        with letters:
            (letter,) = receive(letters, 1)
            assert letter.dead_letter_reason == "no good"
            assert letter.dead_letter_error_description == "at all"
            assert letter.application_properties[b"kept"] == b"yes"
            letters.complete_message(letter)


def defer():
    with client() as bus:
        send(bus, "plain", ServiceBusMessage("later"), ServiceBusMessage("now"))
        with bus.get_queue_receiver("plain") as receiver:
            (first,) = receive(receiver, 1)
            receiver.defer_message(first)
            (second,) = receive(receiver, 1)
            assert body(second) == b"now"
            receiver.complete_message(second)
            nothing(receiver)
            (deferred,) = receiver.receive_deferred_messages([first.sequence_number])
            assert body(deferred) == b"later"
            receiver.complete_message(deferred)
            raises(
                exceptions.MessageNotFoundError,
                lambda: receiver.receive_deferred_messages([first.sequence_number]),
            )


def renew():
    with client() as bus:
        send(bus, "plain", ServiceBusMessage("held"))
        with bus.get_queue_receiver("plain") as receiver:
            (message,) = receive(receiver, 1)
            before = message.locked_until_utc
            advance(20)
            after = receiver.renew_message_lock(message)
            assert after > before, (before, after)
            # It would have ended by now.
            advance(20)
            receiver.complete_message(message)
        send(bus, "plain", ServiceBusMessage("lost"))
        with bus.get_queue_receiver("plain") as receiver:
            (message,) = receive(receiver, 1)
            advance(31)
            raises(exceptions.MessageLockLostError, lambda: receiver.renew_message_lock(message))
            (again,) = receive(receiver, 1)
            assert again.delivery_count == 1 and body(again) == b"lost"
            receiver.complete_message(again)


def renew_session():
    with client() as bus:
        send(bus, "sessions", ServiceBusMessage("held", session_id="s"))
        with bus.get_queue_receiver("sessions", session_id="s") as receiver:
            before = receiver.session.locked_until_utc
            advance(40)
            assert receiver.session.renew_lock() > before
            advance(40)
            (message,) = receive(receiver, 1)
            receiver.complete_message(message)
            advance(61)
            raises(exceptions.SessionLockLostError, receiver.session.renew_lock)


def schedule():
    with client() as bus:
        with bus.get_queue_sender("plain") as sender:
            due = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)
            numbers = sender.schedule_messages(
                [ServiceBusMessage(f"s{i}", message_id=f"s{i}") for i in range(3)], due
            )
            assert numbers == [1, 2, 3], numbers
            sender.cancel_scheduled_messages(numbers[1])
            raises(
                exceptions.MessageNotFoundError,
                lambda: sender.cancel_scheduled_messages(numbers[1]),
            )
            sender.send_messages(
                ServiceBusMessage("by annotation", scheduled_enqueue_time_utc=due)
            )
        with bus.get_queue_receiver("plain") as receiver:
            nothing(receiver)
            assert len(receiver.peek_messages(max_message_count=10)) == 3
            advance(61)
            got = [body(message) for message in receive(receiver, 3)]
            assert sorted(got) == [b"by annotation", b"s0", b"s2"], got


def peek():
    with client() as bus:
        send(bus, "plain", *[ServiceBusMessage(str(i)) for i in range(5)])
        with bus.get_queue_receiver("plain") as receiver:
            shown = receiver.peek_messages(max_message_count=3)
            assert [body(message) for message in shown] == [b"0", b"1", b"2"]
            shown = receiver.peek_messages(max_message_count=10, sequence_number=4)
            assert [message.sequence_number for message in shown] == [4, 5]
            assert receiver.peek_messages(sequence_number=99) == []
            # Nothing was taken by looking.
            assert len(receive(receiver, 5)) == 5


def session_state():
    with client() as bus:
        with bus.get_queue_receiver("sessions", session_id="s") as receiver:
            assert receiver.session.get_state() is None
            receiver.session.set_state(b"page 7")
            assert receiver.session.get_state() == b"page 7"
        with bus.get_queue_receiver("sessions", session_id="s") as receiver:
            assert receiver.session.get_state() == b"page 7"
            receiver.session.set_state(None)
            assert receiver.session.get_state() is None


def duplicates():
    with client() as bus:
        with bus.get_queue_sender("detecting") as sender:
            for message_id in ("a", "b", "a"):
                sender.send_messages(ServiceBusMessage(message_id, message_id=message_id))
            sender.send_messages([ServiceBusMessage(i, message_id=i) for i in ("b", "c", "c")])
            advance(19)
            sender.send_messages(ServiceBusMessage("a", message_id="a"))
            advance(2)
            sender.send_messages(ServiceBusMessage("a", message_id="a"))
        with bus.get_queue_receiver("detecting") as receiver:
            got = [body(message) for message in receive(receiver, 4)]
            assert got == [b"a", b"b", b"c", b"a"], got
            nothing(receiver)


def concurrent_sessions():
    sessions, each = 8, 10
    with client() as bus:
        with bus.get_queue_sender("sessions") as sender:
            for i in range(each):
                sender.send_messages(
                    [ServiceBusMessage(str(i), session_id=f"s{s}") for s in range(sessions)]
                )
    seen, holders, trouble = {}, {}, []

    def work():
        try:
            with client() as bus:
                for _ in range(2):
                    name = NEXT_AVAILABLE_SESSION
                    with bus.get_queue_receiver("sessions", session_id=name) as receiver:
                        session = receiver.session.session_id
                        holders.setdefault(session, []).append(threading.get_ident())
                        for message in receive(receiver, each):
                            seen.setdefault(session, []).append(int(body(message)))
                            receiver.complete_message(message)
        except BaseException as error:
            trouble.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not trouble, trouble
    assert seen == {f"s{s}": list(range(each)) for s in range(sessions)}, seen
    assert all(len(who) == 1 for who in holders.values()), holders


def receive_and_delete():
    with client() as bus:
        send(bus, "plain", *[ServiceBusMessage(str(i)) for i in range(3)])
        mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
        with bus.get_queue_receiver("plain", receive_mode=mode) as receiver:
            assert [body(message) for message in receive(receiver, 3)] == [b"0", b"1", b"2"]
            nothing(receiver)


def topics():
    with client() as bus:
        with bus.get_topic_sender("events") as sender:
            sender.send_messages([ServiceBusMessage(str(i), session_id="s") for i in range(2)])
        with bus.get_subscription_receiver("events", "all") as receiver:
            got = receive(receiver, 2)
            assert [body(message) for message in got] == [b"0", b"1"]
            receiver.complete_message(got[0])
            receiver.dead_letter_message(got[1], reason="why not")
        letters = bus.get_subscription_receiver(
            "events", "all", sub_queue=ServiceBusSubQueue.DEAD_LETTER
        )
        with letters:
            assert receive(letters, 1)[0].dead_letter_reason == "why not"
        with bus.get_subscription_receiver("EVENTS", "By-Session", session_id="s") as receiver:
            got = receive(receiver, 2)
            assert [body(message) for message in got] == [b"0", b"1"]


def time_to_live():
    short = datetime.timedelta(seconds=30)
    with client() as bus:
        send(bus, "plain", ServiceBusMessage("gone", time_to_live=short))
        send(bus, "burying", ServiceBusMessage("buried", time_to_live=short))
        send(bus, "burying", ServiceBusMessage("stays"))
        advance(31)
        with bus.get_queue_receiver("plain") as receiver:
            nothing(receiver)
        with bus.get_queue_receiver("burying") as receiver:
            assert body(receive(receiver, 1)[0]) == b"stays"
        letters = bus.get_queue_receiver("burying", sub_queue=ServiceBusSubQueue.DEAD_LETTER)
        with letters:
            (letter,) = receive(letters, 1)
            assert body(letter) == b"buried"
            assert letter.dead_letter_reason == "TTLExpiredException"


def limits():
    with client(retry_total=0) as bus:
        with bus.get_queue_sender("plain") as sender:
            large = ServiceBusMessage(b"x" * 300_000)
            raises(exceptions.MessageSizeExceededError, lambda: sender.send_messages(large))
        with bus.get_queue_sender("large") as sender:
            sender.send_messages(ServiceBusMessage(b"x" * 300_000))
            assert sender.create_message_batch().max_size_in_bytes == 1024 * 1024
        with bus.get_queue_sender("sessions") as sender:
            without = ServiceBusMessage("no session")
            raises(exceptions.ServiceBusError, lambda: sender.send_messages(without))
            # The SDK itself refuses a partition key that is not the session's id.
            raises(ValueError, lambda: ServiceBusMessage("x", session_id="a", partition_key="b"))
        missing = bus.get_queue_sender("missing")
        nowhere = ServiceBusMessage("nowhere")
        raises(exceptions.MessagingEntityNotFoundError, lambda: missing.send_messages(nowhere))


def wrong_key():
    wrong = CONNECTION.replace("SharedAccessKey=", "SharedAccessKey=not")
    with ServiceBusClient.from_connection_string(wrong, retry_total=0) as bus:
        sender = bus.get_queue_sender("plain")
        message = ServiceBusMessage("x")
        raises(exceptions.ServiceBusAuthenticationError, lambda: sender.send_messages(message))


def busy():
    """The emulator rejects the first two transfers as busy: the SDK tries again by itself."""
    with client(retry_backoff_factor=0.01, retry_total=5) as bus:
        send(bus, "plain", ServiceBusMessage("persistent"))


def disabled():
    with client(retry_total=0) as bus:
        sender = bus.get_queue_sender("plain")
        message = ServiceBusMessage("x")
        raises(exceptions.MessagingEntityDisabledError, lambda: sender.send_messages(message))


def full():
    with client(retry_total=0) as bus:
        sender = bus.get_queue_sender("plain")
        message = ServiceBusMessage("x")
        raises(exceptions.ServiceBusQuotaExceededError, lambda: sender.send_messages(message))


def recovers():
    with client(retry_backoff_factor=0.05, retry_total=5) as bus:
        with bus.get_queue_sender("plain") as sender:
            sender.send_messages(ServiceBusMessage("0"))
            for number, name in enumerate(["detach", "expire", "drop", "close"], 1):
                fault(name)
                sender.send_messages(ServiceBusMessage(str(number)))
        with bus.get_queue_receiver("plain") as receiver:
            for name in ["", "detach", "drop"]:
                if name:
                    fault(name)
                (message,) = receive(receiver, 1)
                receiver.complete_message(message)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done", flush=True)
