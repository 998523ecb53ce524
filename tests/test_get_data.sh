#!/usr/bin/env bash
#
# Tests every way scripts/get_data.sh can end, against a small HTTP server
# that this script starts on a free port of 127.0.0.1. No outside network.
#
# Usage: tests/test_get_data.sh
#        TEST_SEED=N tests/test_get_data.sh    repeat a run's random payload
#
# Prints "ok - NAME", "not ok - NAME: reason" or "skip - NAME: reason" for each
# case; exits with 1 if any case is not ok. KEEP=1 keeps the temporary folder.

set -uo pipefail

script=$(CDPATH='' cd -- "$(dirname -- "$0")/../scripts" && pwd)/get_data.sh
[ -f "$script" ] || { echo "not ok - setup: $script is missing"; exit 1; }
command -v python3 >/dev/null 2>&1 || { echo 'skip - all: python3 was not found'; exit 0; }

tmp=$(mktemp -d "${TMPDIR:-/tmp}/test_get_data.XXXXXX") || { echo 'not ok - setup: mktemp failed'; exit 1; }
server=''
# shellcheck disable=SC2317 # called by the trap
tidy() {
    if [ -n "$server" ]; then kill "$server"; wait "$server"; fi 2>/dev/null
    if [ -n "${KEEP-}" ]; then echo "# kept $tmp"; else rm -rf "$tmp"; fi
}
trap tidy EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The user's own settings must not change what is tested.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY CURL_HOME WGETRC DATA_DIR MIRRORS
export HOME=$tmp no_proxy='*'

# ---- the server -------------------------------------------------------------
# The query of a URL names the client, so that each gets its own "first time".
# A line of requests.log: PATH first-byte-asked-for (or "-" without a Range).

cat >"$tmp/server.py" <<'PY'
import os, random, re, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

folder, seed = sys.argv[1], int(sys.argv[2])
GOOD = random.Random(seed).getrandbits(8 * 300_001).to_bytes(300_001, "big")
BAD = bytes(b ^ 1 for b in GOOD)
seen, lock = {}, threading.Lock()

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        kind = self.path.split("?")[0].strip("/")
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        with lock:
            count = seen[self.path] = seen.get(self.path, 0) + 1
            with open(os.path.join(folder, "requests.log"), "a") as log:
                log.write(f"{self.path} {match[1] if match else '-'}\n")
        first = count == 1
        if kind == "404" or kind == "busy" and first:
            self.send_error(404 if kind == "404" else 503)
            return
        if kind == "reset" and first:
            return                                  # closes without a byte
        body = BAD if kind == "wrong" else GOOD[:-9] if kind == "short" else GOOD
        start = int(match[1]) if match and kind != "norange" else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if kind == "cut" or kind == "cutonce" and first:
            self.wfile.write(body[start:start + 50_000])     # and closes
        elif kind == "hang" and first:
            self.wfile.write(body[start:150_000])
            self.wfile.flush()
            time.sleep(25)                          # the client gives up first
        elif kind == "slow":
            for at in range(start, len(body), 30_000):
                self.wfile.write(body[at:at + 30_000])
                self.wfile.flush()
                time.sleep(0.15)
        else:
            self.wfile.write(body[start:])

class Server(ThreadingHTTPServer):
    daemon_threads = True
    def handle_error(self, *args):                  # clients do hang up here
        pass

for name, data in ("good", GOOD), ("bad", BAD):
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data)
server = Server(("127.0.0.1", 0), Handler)
closed = Server(("127.0.0.1", 0), Handler)          # a port known to be free
closed.server_close()
with open(os.path.join(folder, "ports.new"), "w") as f:
    f.write(f"{server.server_port} {closed.server_port}\n")
os.rename(f.name, os.path.join(folder, "ports"))
server.serve_forever()
PY

seed=${TEST_SEED:-$RANDOM}
echo "# TEST_SEED=$seed"
python3 "$tmp/server.py" "$tmp" "$seed" 2>"$tmp/server.err" &
server=$!
for ((i = 0; i < 100; i++)); do
    [ -s "$tmp/ports" ] && break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
done
[ -s "$tmp/ports" ] || { echo "skip - all: the local server did not start ($(tail -n 1 "$tmp/server.err"))"; exit 0; }
read -r port closed_port <"$tmp/ports"
web=http://127.0.0.1:$port
nothing=http://127.0.0.1:$closed_port/ok

# ---- helpers ----------------------------------------------------------------

good_sha=$(python3 -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$tmp/good")
good_bytes=300001
# shellcheck source=tests/lib.sh
. "$(dirname "$script")/../tests/lib.sh"

new() { # NAME: a case with an empty folder
    begin "$1"
    rm -rf "$tmp/data"; mkdir "$tmp/data"
    final=$tmp/data/tinyshakespeare.txt part=$final.part
    : >"$tmp/requests.log"
}

# A folder with links to just the named tools, to be the whole PATH.
make_path() { # NAME TOOL...
    local folder=$tmp/path.$1 tool found
    shift; mkdir "$folder"
    for tool; do
        found=$(command -v "$tool") && ln -s "$found" "$folder/$tool"
    done
}
basics=(bash cat cut dirname mkdir mv rm sed sleep tail tr wc)
make_path none "${basics[@]}" sha256sum shasum perl
make_path curl "${basics[@]}" sha256sum shasum perl curl
make_path wget "${basics[@]}" sha256sum shasum perl wget
make_path nosha "${basics[@]}" curl wget
make_path shasum "${basics[@]}" shasum perl curl wget

launch() { # PATH-NAME MIRRORS: becomes the script, so call it in a subshell
    exec env PATH="$tmp/path.$1" DATA_DIR="${folder:-$tmp/data}" MIRRORS="$2" \
        EXPECT_SHA256="$good_sha" EXPECT_BYTES="$good_bytes" \
        "$BASH" "$script" >"$tmp/out" 2>"$tmp/err"
}
expect() { # STATUS PATH-NAME MIRRORS
    (launch "$2" "$3")
    local rc=$?
    [ "$rc" = "$1" ] || wrong "exit status $rc instead of $1 ($(tail -n 1 "$tmp/err"))"
}
says() { # PATTERN: in the last line on stderr
    tail -n 1 "$tmp/err" | grep -q -- "$1" || wrong "the message does not say '$1': $(tail -n 1 "$tmp/err")"
}
is_good() {
    cmp -s "$tmp/good" "$final" || wrong 'the final file is missing or wrong'
    no_rest
}
no_rest() {
    [ ! -e "$part" ] || wrong 'a .part is left'
    no_lock
}
no_lock() { [ ! -e "$final.lock" ] || wrong 'the lock is left'; }
no_final() { [ ! -e "$final" ] || wrong 'there is a final file'; no_lock; }
size() { if [ -f "$1" ]; then wc -c <"$1" | tr -d ' '; else echo 0; fi; }
part_is_start() { # BYTES: .part holds more than nothing, of the right content
    local n; n=$(size "$part")
    [ "$n" -ge "$1" ] || wrong "the .part has $n bytes, fewer than $1"
    head -c "$n" "$tmp/good" | cmp -s - "$part" || wrong 'the .part is not the start of the file'
}
requests() { # N
    local n; n=$(wc -l <"$tmp/requests.log" | tr -d ' ')
    [ "$n" = "$1" ] || wrong "$n requests instead of $1"
}
range_of_request() { # N PATTERN: "-" means from the start
    local range; range=$(sed -n "$1s/.* //p" "$tmp/requests.log")
    [[ $range =~ ^($2)$ ]] || wrong "request $1 asked for '$range' instead of '$2'"
}

# Starts the script as a terminal would, in its own process group with the
# default reaction to Ctrl-C; signals it once half of the file is there.
interrupt() { # SIGNAL GROUP-OR-PROCESS STATUS PATH-NAME MIRRORS
    local pid i rc
    set -m # a group of its own
    launch "$4" "$5" & pid=$!
    set +m
    for ((i = 0; i < 100; i++)); do
        (($(size "$part") > 100000)) && break
        sleep 0.1
    done
    if [ "$2" = group ]; then kill "-$1" -- "-$pid"; else kill "-$1" "$pid"; fi 2>/dev/null
    SECONDS=0
    wait "$pid" 2>/dev/null; rc=$?
    ((SECONDS <= 5)) || wrong "took $SECONDS s to stop"
    [ "$rc" = "$3" ] || wrong "exit status $rc instead of $3"
}

# ---- downloads, with each downloader ------------------------------------------

for tool in curl wget; do
    if [ ! -e "$tmp/path.$tool/$tool" ]; then skip "$tool" "$tool is not installed"; continue; fi

    new "$tool: plain download"
    expect 0 $tool "$web/ok?$tool"
    is_good; requests 1; range_of_request 1 -
    end

    new "$tool: 404, then a good mirror"
    expect 0 $tool "$web/404?$tool $web/ok?$tool"
    is_good; requests 2
    end

    new "$tool: 404 everywhere"
    expect 3 $tool "$web/404?$tool $web/404?${tool}2"
    says 404; no_final; no_rest; requests 2
    end

    new "$tool: busy (503) once, then good"
    expect 0 $tool "$web/busy?$tool"
    is_good; requests 2
    end

    new "$tool: no network"
    SECONDS=0
    expect 3 $tool "$nothing http://no-such-host.invalid/x"
    ((SECONDS < 15)) || wrong "took $SECONDS s"
    says 'No network'; no_final; no_rest
    end

    new "$tool: first mirror unreachable, second good"
    expect 0 $tool "$nothing $web/ok?$tool"
    is_good; requests 1
    end

    new "$tool: cut off, then resumed"
    expect 0 $tool "$web/cutonce?$tool"
    is_good; requests 2; range_of_request 2 '[1-9][0-9]*'
    end

    new "$tool: always cut off, resumed by the next run"
    expect 3 $tool "$web/cut?$tool"
    says "of $good_bytes bytes"; no_final; part_is_start 50000
    expect 0 $tool "$web/ok?$tool"
    is_good; range_of_request 4 '[1-9][0-9]*'
    end

    new "$tool: wrong content"
    expect 4 $tool "$web/wrong?$tool"
    says "$good_sha"; no_final; no_rest; requests 1
    end

    new "$tool: wrong size"
    expect 4 $tool "$web/short?$tool"
    says "expected $good_bytes bytes"; no_final; no_rest
    end

    new "$tool: wrong content, then a good mirror"
    expect 0 $tool "$web/wrong?$tool $web/ok?$tool"
    is_good; requests 2; range_of_request 2 -
    end

    for how in INT.group.130 TERM.process.143; do
        IFS=. read -r signal whom status <<<"$how"
        if [[ $(trap -p "$signal") == "trap -- ''"* ]]; then skip "$tool: SIG$signal" 'these tests were started with it ignored'; continue; fi
        new "$tool: SIG$signal, then resumed"
        interrupt "$signal" "$whom" "$status" $tool "$web/hang?$tool$signal"
        says resume; no_final; part_is_start 100000
        expect 0 $tool "$web/hang?$tool$signal"
        is_good; requests 2; range_of_request 2 '[1-9][0-9]*'
        end
    done

    new "$tool: corrupt .part is replaced"
    head -c 1000 "$tmp/bad" >"$part"
    expect 0 $tool "$web/ok?$tool"
    is_good; requests 2; range_of_request 1 1000; range_of_request 2 -
    end

    new "$tool: corrupt .part and a wrong mirror"
    head -c 1000 "$tmp/bad" >"$part"
    expect 4 $tool "$web/wrong?$tool"
    no_final; no_rest; requests 2; range_of_request 2 -
    end

    new "$tool: too long .part is discarded"
    cat "$tmp/good" "$tmp/good" >"$part"
    expect 0 $tool "$web/ok?$tool"
    is_good; requests 1; range_of_request 1 -
    end

    new "$tool: server without Range"
    head -c 1000 "$tmp/good" >"$part"
    expect 0 $tool "$web/norange?$tool"
    is_good
    end

    new "$tool: two runs at once"
    launch $tool "$web/slow?$tool" & other=$!
    for ((i = 0; i < 50; i++)); do [ -d "$final.lock" ] && break; sleep 0.1; done
    expect 0 $tool "$web/slow?$tool"
    wait "$other" || wrong "the first run failed"
    is_good; requests 1
    end
done

# The rest does not depend on the downloader; take one that is there.
tool=curl; [ -e "$tmp/path.curl/curl" ] || tool=wget
if [ ! -e "$tmp/path.$tool/$tool" ]; then skip rest 'neither curl nor wget is installed'; exit "$failed"; fi

new 'stalled connection is given up and resumed'
SECONDS=0 # the server would hold it for 25 s
expect 0 $tool "$web/hang?stall"
((SECONDS < 20)) || wrong "took $SECONDS s"
is_good; requests 2; range_of_request 2 '[1-9][0-9]*'
end

if [ $tool = curl ]; then
    new 'connection closed without a byte is retried'
    expect 0 curl "$web/reset?curl"
    is_good; requests 2
    end
fi

new 'right hash, but not the expected size'
good_bytes=300002 expect 4 $tool "$web/ok?size"
says 'expected 300002 bytes'; no_final; no_rest
end

new 'valid file: no network used'
cp "$tmp/good" "$final"
expect 0 $tool "$web/ok?valid"
requests 0; is_good
grep -q 'already there' "$tmp/out" || wrong 'it does not say that the file is there'
expect 0 none "$nothing"
end

new 'complete .part: no network used'
cp "$tmp/good" "$part"
expect 0 $tool "$web/ok?complete"
requests 0; is_good
end

new 'other content under the final name is kept'
echo 'my own text' >"$final"
expect 6 $tool "$web/ok?other"
says 'move it away'; requests 0; no_lock
[ "$(cat "$final")" = 'my own text' ] || wrong 'the file was changed'
end

new 'same size, other content is kept'
cp "$tmp/bad" "$final"
expect 6 $tool "$web/ok?other"
says "$good_sha"; requests 0
cmp -s "$tmp/bad" "$final" || wrong 'the file was changed'
end

new 'neither curl nor wget'
expect 5 none "$web/ok?none"
says 'curl nor wget'; no_final; no_rest
end

new 'no SHA-256 tool'
expect 5 nosha "$web/ok?nosha"
says 'sha256sum nor shasum'; no_final; no_rest; requests 0
end

if [ -e "$tmp/path.shasum/shasum" ]; then
    new 'shasum instead of sha256sum'
    expect 0 shasum "$web/ok?shasum"
    is_good
    end
else
    skip 'shasum instead of sha256sum' 'shasum is not installed'
fi

new 'folder cannot be made'
folder=/dev/null/x expect 6 $tool "$web/ok?folder"
says 'Cannot create'; requests 0
end

if [ "$(id -u)" = 0 ]; then
    skip 'folder is read-only' 'root may write anywhere'
else
    new 'folder is read-only'
    chmod a-w "$tmp/data"
    expect 6 $tool "$web/ok?readonly"
    chmod u+w "$tmp/data"
    says 'Cannot write'; requests 0
    end
fi

new 'folder is made if missing'
folder=$tmp/data/a/b expect 0 $tool "$web/ok?deep"
cmp -s "$tmp/good" "$tmp/data/a/b/tinyshakespeare.txt" || wrong 'the file is missing or wrong'
end

new 'wrong usage'
"$BASH" "$script" no-such-data >"$tmp/out" 2>"$tmp/err"
rc=$?; [ $rc = 2 ] || wrong "exit status $rc instead of 2 for an unknown name"
says usage
"$BASH" "$script" tinyshakespeare extra >"$tmp/out" 2>"$tmp/err"
rc=$?; [ $rc = 2 ] || wrong "exit status $rc instead of 2 for two names"
end

new 'help'
"$BASH" "$script" --help >"$tmp/out" 2>"$tmp/err"
rc=$?; [ $rc = 0 ] || wrong "exit status $rc"
grep -q Usage "$tmp/out" || wrong 'no usage text'
end

exit "$failed"
