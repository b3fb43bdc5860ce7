#!/usr/bin/env bash
# ./dev bench [NAME [CASE ...] [OPTIONS]]: builds what bench/run.py needs, and runs it. Without a name, the list.
. tools/dev/common.sh

root=$PWD
# Before anything is built: the list, --help, and what is wrong with the arguments.
asked=$(cd "$CALLER" && python3 "$root/bench/run.py" "$@" ${1:+--programs}) || exit
case " $* " in "  " | *" --help "* | *" -h "*) echo "$asked"; exit ;; esac
take_sanitizers
tools/dev/setup.sh --quiet
read -ra programs <<<"$asked"
compile "${programs[@]}"
# The Python that has torch, for the peers in Python.
torch=$(remembered_torch)
site=$(dirname "${torch:-$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)}")
python=$site/../../../bin/python3
[ -x "$python" ] || { python=python3; export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}; }
cd "$CALLER"  # Files among the arguments are the caller's.
exec python3 "$root/bench/run.py" "$@" --bin "$root/$BUILD/bin" --python "$python"
