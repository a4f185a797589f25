package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"time"
)

// open makes a WebSocket of a new connection (RFC 6455 section 4.1).
func open(u *url.URL) (net.Conn, *bufio.Reader) {
	conn := dial(u)
	_, err := conn.Write(request("GET", u, "",
		"Upgrade: websocket",
		"Connection: Upgrade",
		"Sec-WebSocket-Version: 13",
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
	))
	check(err)
	reader := bufio.NewReaderSize(conn, 64<<10)
	response, err := http.ReadResponse(reader, nil)
	check(err)
	if response.StatusCode != 101 {
		log.Fatalf("answered %s", response.Status)
	}
	return conn, reader
}

// frame is the head of the next one: its opcode and length.
func frame(reader *bufio.Reader) (byte, int) {
	head := make([]byte, 2)
	_, err := io.ReadFull(reader, head)
	check(err)
	size := int(head[1] & 127)
	if size == 126 {
		var length uint16
		check(binary.Read(reader, binary.BigEndian, &length))
		size = int(length)
	} else if size == 127 {
		var length uint64
		check(binary.Read(reader, binary.BigEndian, &length))
		size = int(length)
	}
	return head[0], size
}

var masked = []byte{0x88, 0x82, 0, 0, 0, 0, 3, 232} // Close 1000

func ws(target string, duration, rate, size, every, preview int) result {
	count := duration * rate
	u := parse(fmt.Sprintf("%s?messages=%d&rate=%d&size=%d&preview_every=%d&preview_size=%d",
		target, count, rate, size, every, preview))
	conn, reader := open(u)
	defer conn.Close()
	var all ages
	texts, previews := 0, 0
	payload := make([]byte, preview+size)
	for {
		first, length := frame(reader)
		_, err := io.ReadFull(reader, payload[:length])
		check(err)
		switch {
		case first == 0x81 && length == size:
			texts++
			all.values = append(all.values, age(payload))
		case first == 0x82 && length == preview:
			previews++
		case first == 0x88:
			conn.Write(masked)
			lost := count - texts + count/every - previews
			return all.into(result{"texts": texts, "previews": previews, "lost": lost})
		default:
			log.Fatalf("unexpected frame %x of %d bytes", first, length)
		}
	}
}

func wsBig(target string, size int) result {
	u := parse(fmt.Sprintf("%s?big=%d", target, size))
	began := time.Now()
	conn, reader := open(u)
	defer conn.Close()
	first, length := frame(reader)
	if first != 0x82 || length != size {
		log.Fatalf("unexpected frame %x of %d bytes", first, length)
	}
	_, err := io.CopyN(io.Discard, reader, int64(size))
	check(err)
	took := time.Since(began).Seconds()
	conn.Write(masked)
	return result{"seconds": took}
}
