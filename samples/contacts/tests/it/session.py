"""Receives one session of a queue by Microsoft's SDK, unmodified, and prints its messages.

Run: session.py QUEUE SESSION COUNT, with the connection string in the environment. Each message is
completed and printed as a line of JSON; it ends after so many, or after a minute.
"""

import json
import os
import signal
import sys

from azure.servicebus import ServiceBusClient

queue, session, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
signal.alarm(60)
with ServiceBusClient.from_connection_string(os.environ["CONNECTION_STRING"]) as bus:
    with bus.get_queue_receiver(queue, session_id=session, max_wait_time=50) as receiver:
        for message in receiver:
            line = {
                "id": message.message_id,
                "session": message.session_id,
                "subject": message.subject,
                "contentType": message.content_type,
                "data": json.loads(str(message)),
            }
            print(json.dumps(line), flush=True)
            receiver.complete_message(message)
            count -= 1
            if count == 0:
                break
