#!/bin/sh
# Two replicas of the demo model behind one address: the second question about a text goes where the text is cached.
# Needs `pip install "branchwise[cluster]"`.
set -eu
branchwise serve smollm2-135m --replicas 2 --num-slots 8192 --port 8000 &
server=$!
trap 'kill $server; wait $server' EXIT
until curl -sf http://127.0.0.1:8000/health; do sleep 1; done

text="The old mill by the river was built in 1832 by two brothers, and burnt down in 1901; what is left are its walls, \
the wheel, and a letter in which the older brother asks the town for a bridge, since the ford could not be used in spring."
for question in "When was it built?" "When did it burn down?" "What did he ask for?"; do
  curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
    -d "{\"prompt\": \"$text Question: $question Answer:\", \"max_tokens\": 8, \"temperature\": 0}"
  echo
done
