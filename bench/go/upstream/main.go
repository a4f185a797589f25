// Upstream plays the engines: it answers at once, streams at a given pace, takes and gives bytes as fast as it can.
//
//	upstream LISTEN
//
// To turnstile's own looks it is an Ollama without loaded models and a ComfyUI without jobs.
package main

import (
	"bufio"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

const answer = `{"model":"llama3.2","message":{"role":"assistant","content":"All is well with you."},"done":true}` + "\n  "

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: upstream LISTEN")
	}
	http.HandleFunc("/api/version", json(`{"version":"0.31.0"}`))
	http.HandleFunc("/api/ps", json(`{"models":[]}`))
	http.HandleFunc("/queue", json(`{"queue_running":[],"queue_pending":[]}`))
	http.HandleFunc("/history", json(`{}`))
	http.HandleFunc("/system_stats", json(`{"system":{},"devices":[{"name":"cuda:0","type":"cuda","index":0,`+
		`"vram_total":17179869184,"vram_free":17179869184,"torch_vram_total":0,"torch_vram_free":0}]}`))
	http.HandleFunc("/api/chat", chat)
	http.HandleFunc("/api/blobs/", sink)
	http.HandleFunc("/bytes", bytes)
	http.HandleFunc("/ws", websocket)
	log.Fatal(http.ListenAndServe(os.Args[1], nil))
}

func json(text string) http.HandlerFunc {
	body := []byte(text)
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Write(body)
	}
}

// number is a parameter of the query; 0 where it is missing.
func number(r *http.Request, name string) int {
	value, _ := strconv.Atoi(r.URL.Query().Get(name))
	return value
}

// chat answers 100 bytes, or streams "chunks" pieces of "size" bytes, "rate" a second.
func chat(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	chunks := number(r, "chunks")
	if chunks == 0 {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, answer)
		return
	}
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	stream(conn, chunks, number(r, "rate"), number(r, "size"))
}

// stream writes each chunk with one system call, which net/http does not.
func stream(conn net.Conn, chunks, rate, size int) {
	io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n"+
		"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
	head := fmt.Sprintf("%x\r\n", size)
	chunk := []byte(head + strings.Repeat("x", size-1) + "\n\r\n")
	pause := time.Second / time.Duration(rate)
	due := time.Now()
	for i := 0; i < chunks; i++ {
		due = due.Add(pause)
		time.Sleep(time.Until(due))
		stamp(chunk[len(head):])
		if _, err := conn.Write(chunk); err != nil {
			return
		}
	}
	io.WriteString(conn, "0\r\n\r\n")
}

// stamp puts the time into the first 20 bytes.
func stamp(payload []byte) {
	copy(payload, fmt.Sprintf("%020d", time.Now().UnixNano()))
}

func sink(w http.ResponseWriter, r *http.Request) {
	buffer := make([]byte, 256<<10)
	size := 0
	for {
		n, err := r.Body.Read(buffer)
		size += n
		if err != nil {
			break
		}
	}
	fmt.Fprintln(w, size)
}

func bytes(w http.ResponseWriter, r *http.Request) {
	left := number(r, "n")
	w.Header().Set("Content-Length", strconv.Itoa(left))
	buffer := make([]byte, 256<<10)
	for left > 0 {
		if left < len(buffer) {
			buffer = buffer[:left]
		}
		n, err := w.Write(buffer)
		if err != nil {
			return
		}
		left -= n
	}
}

// websocket sends "messages" text messages of "size" bytes, "rate" a second, with a binary one of "preview_size" bytes
// after every "preview_every"; or one binary message of "big" bytes; or, asked for nothing, a status as ComfyUI does.
func websocket(w http.ResponseWriter, r *http.Request) {
	sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	conn, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
		"Sec-WebSocket-Accept: %s\r\n\r\n", base64.StdEncoding.EncodeToString(sum[:]))
	gone := make(chan bool)
	go func() {
		drain(buffered.Reader)
		close(gone)
	}()
	switch {
	case number(r, "big") > 0:
		conn.Write(frame(2, make([]byte, number(r, "big"))))
	case number(r, "messages") > 0:
		messages(conn, r)
	default:
		text := `{"type":"status","data":{"status":{"exec_info":{"queue_remaining":0}},"sid":"bench"}}`
		conn.Write(frame(1, []byte(text)))
		<-gone
		return
	}
	conn.Write(frame(8, []byte{3, 232})) // 1000
	select {
	case <-gone:
	case <-time.After(10 * time.Second):
	}
}

func messages(conn net.Conn, r *http.Request) {
	size, every := number(r, "size"), number(r, "preview_every")
	text := frame(1, []byte(strings.Repeat("x", size)))
	preview := frame(2, make([]byte, number(r, "preview_size")))
	pause := time.Second / time.Duration(number(r, "rate"))
	due := time.Now()
	for i := 1; i <= number(r, "messages"); i++ {
		due = due.Add(pause)
		time.Sleep(time.Until(due))
		stamp(text[len(text)-size:])
		if _, err := conn.Write(text); err != nil {
			return
		}
		if every > 0 && i%every == 0 {
			if _, err := conn.Write(preview); err != nil {
				return
			}
		}
	}
}

// frame is a whole unmasked message in one frame (RFC 6455 section 5.2).
func frame(opcode byte, payload []byte) []byte {
	head := []byte{0x80 | opcode}
	switch size := len(payload); {
	case size < 126:
		head = append(head, byte(size))
	case size < 65536:
		head = binary.BigEndian.AppendUint16(append(head, 126), uint16(size))
	default:
		head = binary.BigEndian.AppendUint64(append(head, 127), uint64(size))
	}
	return append(head, payload...)
}

// drain reads until the client's Close frame or the end of the connection.
func drain(reader *bufio.Reader) {
	for {
		head := make([]byte, 2)
		if _, err := io.ReadFull(reader, head); err != nil || head[0]&15 == 8 {
			return
		}
		size := int64(head[1] & 127)
		if size == 126 {
			var length uint16
			binary.Read(reader, binary.BigEndian, &length)
			size = int64(length)
		} else if size == 127 {
			binary.Read(reader, binary.BigEndian, &size)
		}
		if head[1]&128 != 0 {
			size += 4
		}
		if _, err := io.CopyN(io.Discard, reader, size); err != nil {
			return
		}
	}
}
