// Load makes the measurements for which wrk is not made. Each prints one JSON object.
//
//	load get     URL CONNECTIONS SECONDS              closed loop of GETs (or POSTs of BODY); for where wrk is missing
//	load post    URL CONNECTIONS SECONDS BODY
//	load streams URL STREAMS RATE SIZE SECONDS        chunks of paced streams that arrive, and their age
//	load first   REQUESTS NAME=URL...                 time to the first byte, one request at a time, contestants in turn
//	load up      URL BYTES                            one upload
//	load down    URL BYTES                            one download
//	load ws      URL SECONDS RATE SIZE EVERY PREVIEW  paced messages: how many were lost, and their age
//	load wsbig   URL BYTES                            one long message
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

type result map[string]interface{}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 3 {
		log.Fatal("usage: load MEASUREMENT ... (see the source)")
	}
	args := os.Args[2:]
	var found result
	switch os.Args[1] {
	case "get":
		found = loop(args[0], "", number(args[1]), seconds(args[2]))
	case "post":
		found = loop(args[0], args[3], number(args[1]), seconds(args[2]))
	case "streams":
		found = streams(args[0], number(args[1]), number(args[2]), number(args[3]), seconds(args[4]))
	case "first":
		found = first(number(args[0]), args[1:])
	case "up":
		found = up(args[0], number(args[1]))
	case "down":
		found = down(args[0], number(args[1]))
	case "ws":
		found = ws(args[0], number(args[1]), number(args[2]), number(args[3]), number(args[4]), number(args[5]))
	case "wsbig":
		found = wsBig(args[0], number(args[1]))
	default:
		log.Fatalf("no measurement %q", os.Args[1])
	}
	json.NewEncoder(os.Stdout).Encode(found)
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	check(err)
	return value
}

func seconds(text string) time.Duration {
	value, err := strconv.ParseFloat(text, 64)
	check(err)
	return time.Duration(value * float64(time.Second))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// dial connects; the address is the host of the URL.
func dial(u *url.URL) net.Conn {
	conn, err := net.DialTimeout("tcp", u.Host, 10*time.Second)
	check(err)
	return conn
}

func parse(text string) *url.URL {
	u, err := url.Parse(text)
	check(err)
	return u
}

// request is the wire form of one; net/http would add goroutines and buffers of its own.
func request(method string, u *url.URL, body string, more ...string) []byte {
	lines := []string{
		method + " " + u.RequestURI() + " HTTP/1.1",
		"Host: " + u.Host,
		"User-Agent: bench",
		"Accept: */*",
	}
	if method == "POST" {
		lines = append(lines, "Content-Type: application/json", fmt.Sprintf("Content-Length: %d", len(body)))
	}
	lines = append(lines, more...)
	return []byte(strings.Join(lines, "\r\n") + "\r\n\r\n" + body)
}

// read takes one response whose body has a length.
func read(reader *bufio.Reader) {
	response, err := http.ReadResponse(reader, nil)
	check(err)
	if response.StatusCode != 200 {
		log.Fatalf("answered %s", response.Status)
	}
	_, err = io.Copy(io.Discard, response.Body)
	check(err)
}

func loop(target, body string, connections int, duration time.Duration) result {
	u := parse(target)
	method := "GET"
	if body != "" {
		method = "POST"
	}
	message := request(method, u, body)
	var count int64
	var wait sync.WaitGroup
	began := time.Now()
	for i := 0; i < connections; i++ {
		wait.Add(1)
		go func() {
			defer wait.Done()
			conn := dial(u)
			defer conn.Close()
			reader := bufio.NewReader(conn)
			for time.Since(began) < duration {
				_, err := conn.Write(message)
				check(err)
				read(reader)
				atomic.AddInt64(&count, 1)
			}
		}()
	}
	wait.Wait()
	return result{"requests": count, "seconds": time.Since(began).Seconds()}
}

// ages are differences between the time that a message carries and now, in milliseconds.
type ages struct {
	lock   sync.Mutex
	values []float64
}

func age(payload []byte) float64 {
	sent, err := strconv.ParseInt(string(payload[:20]), 10, 64)
	check(err)
	return float64(time.Now().UnixNano()-sent) / 1e6
}

func (a *ages) add(values []float64) {
	a.lock.Lock()
	a.values = append(a.values, values...)
	a.lock.Unlock()
}

func quantile(sorted []float64, share float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(share*float64(len(sorted)-1)+0.5)]
}

func (a *ages) into(found result) result {
	sort.Float64s(a.values)
	found["p50_ms"] = quantile(a.values, 0.5)
	found["p99_ms"] = quantile(a.values, 0.99)
	found["max_ms"] = quantile(a.values, 1)
	return found
}

func streams(target string, count, rate, size int, duration time.Duration) result {
	lead := time.Second // for all to be open
	chunks := int((duration + lead + time.Second).Seconds() * float64(rate))
	u := parse(fmt.Sprintf("%s?chunks=%d&rate=%d&size=%d", target, chunks, rate, size))
	message := request("POST", u, `{"model":"llama3.2","messages":[{"role":"user","content":"Hello"}]}`)
	began := time.Now()
	from, until := began.Add(lead), began.Add(lead+duration)
	var all ages
	var wait sync.WaitGroup
	for i := 0; i < count; i++ {
		wait.Add(1)
		go func(i int) {
			defer wait.Done()
			// Spread over half of the lead, so that the streams do not beat in step.
			time.Sleep(lead / 2 * time.Duration(i) / time.Duration(count))
			conn := dial(u)
			defer conn.Close()
			_, err := conn.Write(message)
			check(err)
			reader := bufio.NewReader(conn)
			response, err := http.ReadResponse(reader, nil)
			check(err)
			if response.StatusCode != 200 {
				log.Fatalf("answered %s", response.Status)
			}
			chunk := make([]byte, size)
			values := make([]float64, 0, chunks)
			for {
				_, err := io.ReadFull(response.Body, chunk)
				now := time.Now()
				if err != nil || now.After(until) {
					break
				}
				if now.After(from) {
					values = append(values, age(chunk))
				}
			}
			all.add(values)
		}(i)
	}
	wait.Wait()
	ideal := float64(count*rate) * duration.Seconds()
	return all.into(result{"chunks": len(all.values), "share": float64(len(all.values)) / ideal})
}

func first(requests int, targets []string) result {
	type contestant struct {
		name    string
		message []byte
		conn    net.Conn
		times   ages
	}
	var all []*contestant
	for _, target := range targets {
		name, address, _ := strings.Cut(target, "=")
		u := parse(address)
		all = append(all, &contestant{name: name, message: request("GET", u, ""), conn: dial(u)})
	}
	buffer := make([]byte, 64<<10)
	for i := -20; i < requests; i++ { // the first twenty warm up
		for _, c := range all {
			time.Sleep(time.Millisecond)
			began := time.Now()
			_, err := c.conn.Write(c.message)
			check(err)
			size, err := c.conn.Read(buffer)
			took := time.Since(began)
			check(err)
			for !strings.Contains(string(buffer[:size]), "}") { // the body's end
				more, err := c.conn.Read(buffer[size:])
				check(err)
				size += more
			}
			if i >= 0 {
				c.times.values = append(c.times.values, float64(took.Nanoseconds())/1e6)
			}
		}
	}
	found := result{}
	for _, c := range all {
		found[c.name] = c.times.into(result{})
	}
	return found
}

func up(target string, size int) result {
	u := parse(target)
	conn := dial(u)
	defer conn.Close()
	head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n", u.RequestURI(), u.Host, size)
	began := time.Now()
	_, err := io.WriteString(conn, head)
	check(err)
	buffer := make([]byte, 256<<10)
	for left := size; left > 0; {
		if left < len(buffer) {
			buffer = buffer[:left]
		}
		n, err := conn.Write(buffer)
		check(err)
		left -= n
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	check(err)
	body, err := io.ReadAll(response.Body)
	check(err)
	if strings.TrimSpace(string(body)) != strconv.Itoa(size) {
		log.Fatalf("%d bytes sent, answer %q", size, body)
	}
	return result{"seconds": time.Since(began).Seconds()}
}

func down(target string, size int) result {
	u := parse(fmt.Sprintf("%s?n=%d", target, size))
	conn := dial(u)
	defer conn.Close()
	began := time.Now()
	_, err := conn.Write(request("GET", u, ""))
	check(err)
	reader := bufio.NewReaderSize(conn, 4096)
	response, err := http.ReadResponse(reader, nil)
	check(err)
	if response.ContentLength != int64(size) {
		log.Fatalf("answered %s, %d bytes", response.Status, response.ContentLength)
	}
	buffer := make([]byte, 256<<10)
	for left := size; left > 0; {
		n, err := response.Body.Read(buffer)
		if n == 0 {
			check(err)
		}
		left -= n
	}
	return result{"seconds": time.Since(began).Seconds()}
}
